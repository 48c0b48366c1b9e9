// Block quantization to 8 or 4 bits. The results equal those of reference.py bit for bit; format.py has the format.
#include <omp.h>

#include <type_traits>
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "no_contraction.h"
#include "numbers.h"

namespace {

constexpr float SMALLEST = 0x1p-118f, LARGEST = 0x1.fffffep127f;
// 1.5 * 2^23. Adding it to a small float puts the nearest integer, ties to even, into the low bits.
constexpr float INTEGER = 12582912.0f;
constexpr int32_t INTEGER_BITS = 0x4b400000;
constexpr int64_t MIN_ELEMENTS_FOR_THREADS = 1 << 15;

template <int BITS>
constexpr int32_t MAX_CODE = BITS == 8 ? 127 : 7;

struct fp16 {
    uint16_t bits;
};

// Vectors of 16 numbers fill the widest registers. The compiler splits them for narrower ones.
constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// Conversions between element sizes. Without the intrinsics, GCC converts through scalar registers.
#if defined(__AVX512BW__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own headers
Words widen(const Bytes& x) { return (Words)_mm512_cvtepu8_epi32((__m128i)x); }
Words widen(const Halves& x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
Halves to_halves(const Words& x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
Bytes to_bytes(const Words& x) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)x); }
#else
Words widen(const Halves& x) { return __builtin_convertvector(x, Words); }
Words widen(const Bytes& x) { return widen(__builtin_convertvector(x, Halves)); }
Halves to_halves(const Words& x) { return __builtin_convertvector(x, Halves); }
Bytes to_bytes(const Words& x) { return __builtin_convertvector(to_halves(x), Bytes); }
#endif

// sum + x * factor. The product must be exact in fp32, so that fused and separate rounding give the same result.
#if defined(__AVX512BW__)
Floats add_product(const Floats& sum, const Floats& x, float factor) {
    return (Floats)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(factor), (__m512)sum);
}
#else
Floats add_product(const Floats& sum, const Floats& x, float factor) { return sum + x * factor; }
#endif

// Load min(n, LANES) numbers. The other lanes are zero.
template <typename Vector, typename T>
Vector load_lanes(const T* from, int64_t n) {
    Vector lanes = {};
    std::memcpy(&lanes, from, n < LANES ? n * sizeof(T) : sizeof lanes);
    return lanes;
}

template <typename Vector, typename T>
void store_lanes(T* to, const Vector& lanes, int64_t n) {
    std::memcpy(to, &lanes, n < LANES ? n * sizeof(T) : sizeof lanes);
}

Floats load(const float* from, int64_t n) { return load_lanes<Floats>(from, n); }

Floats load(const bf16* from, int64_t n) { return (Floats)(widen(load_lanes<Halves>(from, n)) << 16); }

// For finite numbers only: infinity and NaN would read as finite numbers.
Floats load(const fp16* from, int64_t n) {
    Words bits = widen(load_lanes<Halves>(from, n));
    return (Floats)((Words)((Floats)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
}

// Round to nearest, ties to even. NaN must have the bits 0x7fc00000 to stay NaN.
void store(float* to, const Floats& x, int64_t n) { store_lanes(to, x, n); }

void store(bf16* to, const Floats& x, int64_t n) {
    Words bits = (Words)x;
    store_lanes(to, to_halves((bits + 0x7fff + (bits >> 16 & 1)) >> 16), n);
}

void store(fp16* to, const Floats& x, int64_t n) {
    Words bits = (Words)x, rest = bits & 0x7fffffff;
    // The last bit of a sum with 0.5 is 2^-24, the smallest fp16 subnormal.
    Words small = (Words)((Floats)rest + 0.5f) - 0x3f000000;
    Words normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    Words large = rest > 0x7f800000 ? rest * 0 + 0x7e00 : rest * 0 + 0x7c00;
    Words rounded = rest < 0x38800000 ? small : (rest < 0x477ff000 ? normal : large);
    store_lanes(to, to_halves(rounded | (bits >> 16 & 0x8000)), n);
}

// Bits of the absolute value. Their integer order is that of the values; infinity is above all numbers, NaN above
// infinity.
uint32_t magnitude(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}
uint16_t magnitude(bf16 x) { return x.bits & 0x7fffu; }
uint16_t magnitude(fp16 x) { return x.bits & 0x7fffu; }

float from_magnitude(uint32_t bits, float) { return ((Floats)(Words{bits}))[0]; }
float from_magnitude(uint32_t bits, bf16) { return from_magnitude(bits << 16, 0.0f); }
float from_magnitude(uint32_t bits, fp16) {
    fp16 value{static_cast<uint16_t>(bits)};
    return bits < 0x7c00u ? load(&value, 1)[0] : from_magnitude(0x7f800000u, 0.0f);
}

// The greatest absolute value; not finite if any element is not finite.
template <typename T>
float absolute_max(const T* x, int64_t n) {
    decltype(magnitude(T())) greatest = 0;
    for (int64_t i = 0; i < n; i++) {
        auto bits = magnitude(x[i]);
        greatest = bits > greatest ? bits : greatest;
    }
    return from_magnitude(greatest, T());
}

uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Rounding to nearest: adds zero before rounding.
struct NoDither {
    Words hash(int64_t) const { return Words{}; }
    Floats high(const Floats& value, const Words&) const { return value; }
    Floats low(const Floats& value, const Words&) const { return value; }
};

// Stochastic rounding: adds a number between -1/2 and 1/2 before rounding. The number comes from a hash of seed, row
// and byte: from its high half, or, for the second code of the byte, from its low half.
struct Dither {
    uint32_t a, b;

    Dither(int64_t key, int64_t row) {
        a = mix(static_cast<uint32_t>(key) + static_cast<uint32_t>(row) * 0x9e3779b9u);
        b = mix(static_cast<uint32_t>(key >> 32) + a);
    }

    Words hash(int64_t byte) const {
        Words x = (Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<uint32_t>(byte)) ^ a;
        x = (x ^ x >> 16) * 0x7feb352du;
        return ((x ^ x >> 15) + b) * 0x846ca68bu;
    }
    Floats high(const Floats& value, const Words& hash) const {
        return add_product(value, __builtin_convertvector((Ints)hash >> 15 | 1, Floats), 0x1p-17f);
    }
    Floats low(const Floats& value, const Words& hash) const { return high(value, hash << 16); }
};

// Pack the block `x` of n elements and return its scale. start: byte of the first code within the row.
template <int BITS, typename T, typename Added>
float pack_block(const T* x, int64_t n, int64_t start, uint8_t* payload, Added added) {
    int64_t bytes = n * BITS / 8;
    float absmax = absolute_max(x, n);
    if (!(absmax >= SMALLEST && absmax <= LARGEST)) {
        std::memset(payload, 0, static_cast<size_t>(n) * BITS / 8);
        return absmax < SMALLEST ? 0.0f : from_magnitude(0x7fc00000u, 0.0f);
    }
    float scale = absmax * (1.0f / MAX_CODE<BITS>), inverse = 1.0f / scale;
    // The low bits hold the code. The store drops the others.
    auto rounded = [](const Floats& value) { return (Ints)(value + INTEGER); };
    auto some = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
        Words hash = added.hash(start + i);
        Ints code = rounded(added.high(load(x + i, left) * inverse, hash));
        if constexpr (BITS == 4) {
            // No clamp: dither is at most 1/2 - 2^-17, and absmax * inverse exceeds 7 by less than 2^-17.
            Ints second = rounded(added.low(load(x + bytes + i, left) * inverse, hash));
            code = (code & 15) | second << 4;
        } else if constexpr (std::is_same_v<Added, Dither>) {
            // Clamp: absmax * inverse may exceed 127 by more than 2^-17.
            code = code > INTEGER_BITS + MAX_CODE<BITS> ? code * 0 + (INTEGER_BITS + MAX_CODE<BITS>) : code;
            code = code > INTEGER_BITS - MAX_CODE<BITS> ? code : code * 0 + (INTEGER_BITS - MAX_CODE<BITS>);
        }
        store_lanes(payload + i, to_bytes((Words)code), left);
    };
    int64_t i = 0;
    for (; i + LANES <= bytes; i += LANES) some(i, LANES);
    if (i < bytes) some(i, bytes - i);
    return scale;
}

// Decodes the codes of BITS bits at bit SHIFT of each byte.
template <int BITS, int SHIFT>
struct Values {
    float scale;

    explicit Values(float scale) : scale(scale) {}
    Floats operator()(const Words& byte) const {
        return __builtin_convertvector((Ints)(byte << (32 - BITS - SHIFT)) >> (32 - BITS), Floats) * scale;
    }
};

#if defined(__AVX512BW__)
// One register holds the values of all 16 codes. The lookup halves the time of sums.
template <int SHIFT>
struct Values<4, SHIFT> {
    Floats table;

    explicit Values(float scale) : table(Floats{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1} * scale) {}
    Floats operator()(const Words& byte) const {
        return (Floats)_mm512_permutexvar_ps((__m512i)(byte >> SHIFT), (__m512)table);
    }
};
#endif

// Unpack one code of each byte of ROWS payloads, and write the sum over rows to `out`; if `add`, add it to `out`.
template <int ROWS, typename V, typename T>
void unpack(const uint8_t* const (&payload)[ROWS], const V (&values)[ROWS], int64_t bytes, bool add, T* out) {
    auto some = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
        Floats sum = {};
        if (add) sum = load(out + i, left);
        for (int row = 0; row < ROWS; row++) sum += values[row](widen(load_lanes<Bytes>(payload[row] + i, left)));
        store(out + i, sum, left);
    };
    int64_t i = 0;
    for (; i + LANES <= bytes; i += LANES) some(i, LANES);
    if (i < bytes) some(i, bytes - i);
}

// A packed buffer, and the number of threads that work on it.
struct Packed {
    uint8_t* data;
    int64_t stride, rows, numel, bits, block, threads;

    int64_t blocks() const { return (numel + block - 1) / block; }
    int64_t size(int64_t index) const { return index * block + block < numel ? block : numel - index * block; }
    uint8_t* payload(int64_t row, int64_t index) const { return data + row * stride + index * block * bits / 8; }
    uint8_t* scale(int64_t row, int64_t index) const { return data + row * stride + numel * bits / 8 + index * 4; }
};

// Call work(row, index) for every block of the rows. Each thread takes a contiguous range of blocks.
template <typename Work>
void for_blocks(const Packed& packed, int64_t rows, Work work) {
    int64_t blocks = packed.blocks(), total = rows * blocks;
    bool small = packed.rows * packed.numel < MIN_ELEMENTS_FOR_THREADS;
#pragma omp parallel num_threads(small ? 1 : static_cast<int>(packed.threads))
    {
        int64_t team = omp_get_num_threads(), part = omp_get_thread_num();
        int64_t start = total * part / team, end = total * (part + 1) / team;
        int64_t row = start / (blocks ? blocks : 1), index = start - row * blocks;
        for (int64_t i = start; i < end; i++) {
            work(row, index);
            if (++index == blocks) index = 0, row++;
        }
    }
}

template <int BITS, typename T>
void pack_rows(const T* x, int64_t x_stride, const Packed& packed, int64_t key) {
    for_blocks(packed, packed.rows, [=](int64_t row, int64_t index) {
        int64_t column = index * packed.block, n = packed.size(index);
        const T* from = x + row * x_stride + column;
        uint8_t* to = packed.payload(row, index);
        int64_t start = column * BITS / 8;
        float scale = key < 0 ? pack_block<BITS>(from, n, start, to, NoDither())
                              : pack_block<BITS>(from, n, start, to, Dither(key, row));
        std::memcpy(packed.scale(row, index), &scale, 4);
    });
}

// The scale of a packed block. A scale that is negative or not finite becomes the NaN that `store` keeps.
float scale_of(const Packed& packed, int64_t row, int64_t index) {
    float scale;
    std::memcpy(&scale, packed.scale(row, index), 4);
    return scale >= 0.0f && scale <= LARGEST ? scale : from_magnitude(0x7fc00000u, 0.0f);
}

// Unpack block `index` of `row` and of each `row + more`, and write their sum to `out`.
template <int BITS, typename T, typename... More>
void unpack_rows(const Packed& packed, int64_t row, int64_t index, bool add, T* out, More... more) {
    constexpr int ROWS = 1 + sizeof...(more);
    const uint8_t* payload[ROWS] = {packed.payload(row, index), packed.payload(row + more, index)...};
    auto halves = [&](auto shift, T* to) {
        using V = Values<BITS, decltype(shift)::value>;
        const V values[ROWS] = {V(scale_of(packed, row, index)), V(scale_of(packed, row + more, index))...};
        unpack(payload, values, packed.size(index) * BITS / 8, add, to);
    };
    halves(std::integral_constant<int, 0>(), out);
    // One half after the other: writing to two places at once is slower than reading the payload twice from the cache.
    if constexpr (BITS == 4) halves(std::integral_constant<int, 4>(), out + packed.size(index) / 2);
}

// Sums four rows at a time, so that it reads and writes the sum a quarter as often.
template <int BITS>
void sum_rows(const Packed& packed, float* out, bool accumulate) {
    for_blocks(packed, 1, [=](int64_t, int64_t index) {
        float* to = out + index * packed.block;
        int64_t row = 0;
        for (; row + 4 <= packed.rows; row += 4) unpack_rows<BITS>(packed, row, index, accumulate || row, to, 1, 2, 3);
        for (; row < packed.rows; row++) unpack_rows<BITS>(packed, row, index, accumulate || row, to);
    });
}

// Call f with a null pointer to the type of `dtype`.
template <typename F>
void with_type(int64_t dtype, F f) {
    if (dtype == 0) f(static_cast<float*>(nullptr));
    if (dtype == 1) f(static_cast<bf16*>(nullptr));
    if (dtype == 2) f(static_cast<fp16*>(nullptr));
}

}  // namespace

// x_stride, out_stride: in elements. stride: in bytes. dtype: 0 fp32, 1 bf16, 2 fp16. key: -1 rounds to nearest.
extern "C" void quantize(const void* x, int64_t dtype, int64_t x_stride, uint8_t* data, int64_t stride, int64_t rows,
                         int64_t numel, int64_t bits, int64_t block, int64_t threads, int64_t key) {
    Packed packed{data, stride, rows, numel, bits, block, threads};
    with_type(dtype, [&](auto* type) {
        auto* from = static_cast<const std::remove_pointer_t<decltype(type)>*>(x);
        bits == 8 ? pack_rows<8>(from, x_stride, packed, key) : pack_rows<4>(from, x_stride, packed, key);
    });
}

extern "C" void dequantize(void* out, int64_t dtype, int64_t out_stride, uint8_t* data, int64_t stride, int64_t rows,
                           int64_t numel, int64_t bits, int64_t block, int64_t threads) {
    Packed packed{data, stride, rows, numel, bits, block, threads};
    with_type(dtype, [&](auto* type) {
        for_blocks(packed, rows, [=](int64_t row, int64_t index) {
            auto* to = static_cast<decltype(type)>(out) + row * out_stride + index * block;
            bits == 8 ? unpack_rows<8>(packed, row, index, false, to)
                      : unpack_rows<4>(packed, row, index, false, to);
        });
    });
}

extern "C" void dequantize_sum(float* out, uint8_t* data, int64_t stride, int64_t rows, int64_t numel, int64_t bits,
                               int64_t block, int64_t threads, int64_t accumulate) {
    Packed packed{data, stride, rows, numel, bits, block, threads};
    bits == 8 ? sum_rows<8>(packed, out, accumulate) : sum_rows<4>(packed, out, accumulate);
}
