// The memory traffic of an AdamW step, almost without its arithmetic: read a gradient, add it to three fp32 ranges in
// place, and write a range of 16-bit numbers, past the caches where the processor has AVX-512.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

static void part(const float* gradient, float* master, float* m, float* v, uint16_t* weight, int64_t count) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < count; i += 16) {
        __m512 g = _mm512_loadu_ps(gradient + i), x = _mm512_add_ps(_mm512_loadu_ps(master + i), g);
        _mm512_storeu_ps(master + i, x);
        _mm512_storeu_ps(m + i, _mm512_add_ps(_mm512_loadu_ps(m + i), g));
        _mm512_storeu_ps(v + i, _mm512_add_ps(_mm512_loadu_ps(v + i), g));
        __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
        _mm256_stream_si256((__m256i*)(weight + i), _mm512_cvtepi32_epi16(upper));
    }
    _mm_sfence();
#else
    for (int64_t i = 0; i < count; i++) {
        float x = master[i] + gradient[i];
        master[i] = x;
        m[i] += gradient[i];
        v[i] += gradient[i];
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        weight[i] = static_cast<uint16_t>(bits >> 16);
    }
#endif
}

// count: a multiple of 64 * threads. All ranges begin at multiples of 64 bytes.
extern "C" void streams(const float* gradient, float* master, float* m, float* v, uint16_t* weight, int64_t count,
                        int64_t threads) {
    std::vector<std::thread> team;
    int64_t size = count / threads;
    for (int64_t start = 0; start < count; start += size)
        team.emplace_back(part, gradient + start, master + start, m + start, v + start, weight + start, size);
    for (std::thread& one : team) one.join();
}
