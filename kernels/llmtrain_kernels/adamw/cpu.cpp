// One step of AdamW over a flat range, in one pass over memory. The results equal those of reference.py bit for bit,
// with any instruction set and wherever a range is split. All numbers are rounded to nearest, ties to even.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "no_contraction.h"
#include "numbers.h"
#include "squares.h"

namespace {

constexpr int64_t GROUP = SQUARE_LANES, MIN_ELEMENTS_FOR_THREADS = 1 << 15;
// What such large ranges write elsewhere leaves the caches before it is used. Writing it past the caches is faster.
constexpr int64_t MIN_ELEMENTS_TO_STREAM = 1 << 20;
// How many elements ahead the processor is told to load.
constexpr int64_t AHEAD = 4 * GROUP;

// The numbers of a step, as in reference.py.
struct Numbers {
    float divisor, m_share, v_share, v_kept, eps, rate, kept;
};

// Instruction sets. Each has a vector of LANES fp32 numbers. `stream` writes past the caches, to an aligned address.
struct Plain {
    static constexpr int64_t LANES = 4;
    typedef float Floats __attribute__((vector_size(LANES * 4)));
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

    template <typename Vector>
    static Vector copied(const void* x) {
        Vector lanes;
        std::memcpy(&lanes, x, sizeof lanes);
        return lanes;
    }
    static Floats from(const float* x) { return copied<Floats>(x); }
    static Floats from(const bf16* x) { return (Floats)(__builtin_convertvector(copied<Halves>(x), Words) << 16); }
    static void to(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
    static void to(bf16* to, Floats x) {
        Words bits = (Words)x, sum = bits + 0x7fff + (bits >> 16 & 1);
        Halves all = __builtin_convertvector(x == x ? sum >> 16 : bits * 0 + 0x7fc0, Halves);
        std::memcpy(to, &all, sizeof all);
    }
    template <typename W>
    static void stream(W* to, Floats x) { Plain::to(to, x); }
    static void fence() {}
    static Floats root(Floats x) { return Floats{std::sqrt(x[0]), std::sqrt(x[1]), std::sqrt(x[2]), std::sqrt(x[3])}; }
    static void add_squares(double* sums, Floats x) {
        for (int64_t i = 0; i < LANES; i++) sums[i] += (double)x[i] * (double)x[i];
    }
};

#if defined(__AVX2__)
struct Avx2 {
    static constexpr int64_t LANES = 8;
    static __m256 from(const float* x) { return _mm256_loadu_ps(x); }
    static __m256 from(const bf16* x) {
        __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
        return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
    static void to(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
    static void stream(float* to, __m256 x) { _mm256_stream_ps(to, x); }
    static void to(bf16* to, __m256 x) { _mm_storeu_si128((__m128i*)to, rounded(x)); }
    static void stream(bf16* to, __m256 x) { _mm_stream_si128((__m128i*)to, rounded(x)); }
    static void fence() { _mm_sfence(); }
    static __m128i rounded(__m256 x) {
        __m256i bits = _mm256_castps_si256(x);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        __m256i all = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    }
    static __m256 root(__m256 x) { return _mm256_sqrt_ps(x); }
    static void add_squares(double* sums, __m256 x) {
        for (int half = 0; half < 2; half++) {
            __m256d wide = _mm256_cvtps_pd(half ? _mm256_extractf128_ps(x, 1) : _mm256_castps256_ps128(x));
            _mm256_storeu_pd(sums + 4 * half, _mm256_loadu_pd(sums + 4 * half) + wide * wide);
        }
    }
};
#else
using Avx2 = Plain;
#endif

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own headers
struct Avx512 {
    static constexpr int64_t LANES = 16;
    static __m512 from(const float* x) { return _mm512_loadu_ps(x); }
    static __m512 from(const bf16* x) {
        __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
        return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    }
    static void to(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
    static void stream(float* to, __m512 x) { _mm512_stream_ps(to, x); }
    static void to(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, rounded(x)); }
    static void stream(bf16* to, __m512 x) { _mm256_stream_si256((__m256i*)to, rounded(x)); }
    static void fence() { _mm_sfence(); }
    static __m256i rounded(__m512 x) {
        __m512i bits = _mm512_castps_si512(x);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        __m512i all = _mm512_mask_set1_epi32(_mm512_srli_epi32(sum, 16), nan, 0x7fc0);
        return _mm512_cvtepi32_epi16(all);
    }
    static __m512 root(__m512 x) { return _mm512_sqrt_ps(x); }
    static void add_squares(double* sums, __m512 x) {
        for (int half = 0; half < 2; half++) {
            __m512d wide = _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
            _mm512_storeu_pd(sums + 8 * half, _mm512_loadu_pd(sums + 8 * half) + wide * wide);
        }
    }
};
#else
using Avx512 = Avx2;
#endif

// The flat ranges that a step reads and writes. to: where the new states go, which may be where the old ones are. weight:
// null if no weights are written.
struct States {
    float *master, *m, *v;

    States at(int64_t i) const { return {master + i, m + i, v + i}; }
};

template <typename G, typename W>
struct Ranges {
    States from, to;
    const G* gradient;
    W* weight;

    Ranges at(int64_t i) const { return {from.at(i), to.at(i), gradient + i, weight ? weight + i : nullptr}; }
};

// What is written past the caches: nothing, weights, or weights and new states that are not in the place of the old ones.
enum class Past { NOTHING, WEIGHTS, ALL };

// Step GROUP elements. squares: sums to add the gradient's squares to, or null.
template <typename Set, Past PAST, typename G, typename W>
inline void step_group(const Ranges<G, W>& at, const Numbers& numbers, double* squares) {
    for (int64_t i = 0; i < GROUP; i += Set::LANES) {
        auto g = Set::from(at.gradient + i), m = Set::from(at.from.m + i), v = Set::from(at.from.v + i);
        if (squares) Set::add_squares(squares + i, g);
        g = g / numbers.divisor;
        m = m + (g - m) * numbers.m_share;
        v = v * numbers.v_kept + g * numbers.v_share * g;
        auto master = Set::from(at.from.master + i) * numbers.kept - m / (Set::root(v) + numbers.eps) * numbers.rate;
        if constexpr (PAST == Past::ALL) {
            Set::stream(at.to.m + i, m);
            Set::stream(at.to.v + i, v);
            Set::stream(at.to.master + i, master);
        } else {
            Set::to(at.to.m + i, m);
            Set::to(at.to.v + i, v);
            Set::to(at.to.master + i, master);
        }
        if constexpr (PAST != Past::NOTHING) Set::stream(at.weight + i, master);
        else if (at.weight) Set::to(at.weight + i, master);
    }
}

// Step the last `count` < GROUP elements of a range, in a padded copy.
template <typename Set, typename G, typename W>
void step_tail(const Ranges<G, W>& at, int64_t count, const Numbers& numbers, double* squares) {
    float master[GROUP] = {}, m[GROUP] = {}, v[GROUP] = {};
    G gradient[GROUP] = {};
    W weight[GROUP];
    std::memcpy(master, at.from.master, count * sizeof *master);
    std::memcpy(m, at.from.m, count * sizeof *m);
    std::memcpy(v, at.from.v, count * sizeof *v);
    std::memcpy(gradient, at.gradient, count * sizeof *gradient);
    States copied{master, m, v};
    step_group<Set, Past::NOTHING>(Ranges<G, W>{copied, copied, gradient, weight}, numbers, squares);
    std::memcpy(at.to.master, master, count * sizeof *master);
    std::memcpy(at.to.m, m, count * sizeof *m);
    std::memcpy(at.to.v, v, count * sizeof *v);
    if (at.weight) std::memcpy(at.weight, weight, count * sizeof *weight);
}

// Step the GROUPs of `count` elements.
template <typename Set, Past PAST, typename G, typename W>
void step_groups(const Ranges<G, W>& at, int64_t count, const Numbers& numbers, double* squares) {
    for (int64_t i = 0; i < count; i += GROUP) {
        // Addresses beyond the range do no harm.
        __builtin_prefetch(at.gradient + i + AHEAD);
        for (float* state : {at.from.master, at.from.m, at.from.v}) __builtin_prefetch(state + i + AHEAD, 1);
        step_group<Set, PAST>(at.at(i), numbers, squares);
    }
}

inline bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 64 == 0; }

// What of a large range is written past the caches.
template <typename G, typename W>
Past past_caches(const Ranges<G, W>& at) {
    if (!aligned(at.weight)) return Past::NOTHING;
    bool apart = at.to.m != at.from.m && at.to.v != at.from.v && at.to.master != at.from.master;
    return apart && aligned(at.to.m) && aligned(at.to.v) && aligned(at.to.master) ? Past::ALL : Past::WEIGHTS;
}

// Where a range lies in the blocks of its flat buffer, and how to step it.
struct Partition {
    int64_t count, first, block, lanes, threads;

    int64_t blocks() const { return (first + count + block - 1) / block; }
};

template <typename Set, typename G, typename W>
void step_range(const Ranges<G, W>& range, const Partition& partition, const Numbers& numbers, double* sums) {
    bool large = range.weight && partition.count >= MIN_ELEMENTS_TO_STREAM;
#pragma omp parallel num_threads(partition.threads) if (partition.count > MIN_ELEMENTS_FOR_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t one = 0; one < partition.blocks(); one++) {
            int64_t start = std::max<int64_t>(one * partition.block - partition.first, 0);
            int64_t count = std::min(partition.count, (one + 1) * partition.block - partition.first) - start, rest = count % GROUP;
            Ranges<G, W> at = range.at(start);
            double lanes[SQUARE_LANES] = {}, *squares = sums ? lanes : nullptr;
            Past past = large ? past_caches(at) : Past::NOTHING;
            if (past == Past::ALL) step_groups<Set, Past::ALL>(at, count - rest, numbers, squares);
            else if (past == Past::WEIGHTS) step_groups<Set, Past::WEIGHTS>(at, count - rest, numbers, squares);
            else step_groups<Set, Past::NOTHING>(at, count - rest, numbers, squares);
            if (rest) step_tail<Set>(at.at(count - rest), rest, numbers, squares);
            if (sums) sums[one] = sum_of_lanes(lanes);
        }
        Set::fence();
    }
}

}  // namespace

// master, m, v: fp32 [count]. to_master, to_m, to_v: the same, or other memory for the new states. gradient: [count], bf16 if `short_gradient`, else fp32; only read. weight: [count], bf16
// if `short_weight`, else fp32; or null. sums: fp64, one for each block that the range touches, and total: fp64; they
// receive sums of the gradient's squares; or both are null. first: position of the range in its first block. lanes: 16,
// 8 or 4, the most numbers that an instruction may process.
extern "C" void adamw(float* master, float* m, float* v, float* to_master, float* to_m, float* to_v, void* gradient,
                      int64_t short_gradient, void* weight, int64_t short_weight, double* sums, double* total,
                      float divisor, float m_share, float v_share, float v_kept, float eps, float rate, float kept,
                      int64_t count, int64_t first, int64_t block, int64_t lanes, int64_t threads) {
    Numbers numbers{divisor, m_share, v_share, v_kept, eps, rate, kept};
    Partition partition{count, first, block, lanes, threads};
    auto with = [&](auto* g, auto* w) {
        using G = std::remove_pointer_t<decltype(g)>;
        using W = std::remove_pointer_t<decltype(w)>;
        auto* step = lanes >= 16 ? step_range<Avx512, G, W> : step_range<Avx2, G, W>;
        if (lanes < 8) step = step_range<Plain, G, W>;
        step(Ranges<G, W>{{master, m, v}, {to_master, to_m, to_v}, g, w}, partition, numbers, sums);
    };
    auto with_gradient = [&](auto* g) {
        if (short_weight) with(g, static_cast<bf16*>(weight));
        else with(g, static_cast<float*>(weight));
    };
    if (short_gradient) with_gradient(static_cast<bf16*>(gradient));
    else with_gradient(static_cast<float*>(gradient));
    if (sums) *total = std::accumulate(sums, sums + partition.blocks(), 0.0);
}
