// The memory traffic of an AdamW step without its arithmetic: read a gradient, add it to three fp32 ranges in place,
// and write a range of 16-bit numbers.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

static void part(const float* gradient, float* master, float* m, float* v, uint16_t* weight, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        float x = master[i] + gradient[i];
        master[i] = x;
        m[i] += gradient[i];
        v[i] += gradient[i];
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        weight[i] = static_cast<uint16_t>(bits >> 16);
    }
}

extern "C" void streams(const float* gradient, float* master, float* m, float* v, uint16_t* weight, int64_t count,
                        int64_t threads) {
    std::vector<std::thread> team;
    for (int64_t one = 0; one < threads; one++) {
        int64_t start = count * one / threads / 64 * 64, end = count * (one + 1) / threads / 64 * 64;
        team.emplace_back(part, gradient + start, master + start, m + start, v + start, weight + start, end - start);
    }
    for (std::thread& one : team) one.join();
}
