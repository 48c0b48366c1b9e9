// The sum of squares of fp32 or bf16 numbers, in fp64. Their squares are exact in fp64, so fused and separate
// operations give the same bits. Lanes and blocks fix the order of additions.
#include <algorithm>
#include <cstdint>

#include "numbers.h"
#include "squares.h"

namespace {

constexpr int64_t LANES = SQUARE_LANES;

inline double square(double x) { return x * x; }

template <typename T>
double block_sum(const T* x, int64_t count) {
    double lanes[LANES] = {};
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += square(load(x[i + lane]));
    for (int64_t i = whole; i < count; i++) lanes[i - whole] += square(load(x[i]));
    return sum_of_lanes(lanes);
}

template <typename T>
void block_sums(const T* x, double* sums, int64_t count, int64_t first, int64_t block, int64_t threads) {
    int64_t blocks = (first + count + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 65536)
    for (int64_t one = 0; one < blocks; one++) {
        int64_t start = std::max<int64_t>(one * block - first, 0);
        int64_t end = std::min(count, (one + 1) * block - first);
        sums[one] = block_sum(x + start, end - start);
    }
}

}  // namespace

// x: [count], bf16 if `is_short`, else fp32. first: position of x[0] in its block. sums: fp64, one per block that x
// touches.
extern "C" void squared_sum(const void* x, int64_t is_short, double* sums, double* total, int64_t count, int64_t first,
                            int64_t block, int64_t threads) {
    if (is_short) block_sums(static_cast<const bf16*>(x), sums, count, first, block, threads);
    else block_sums(static_cast<const float*>(x), sums, count, first, block, threads);
    int64_t blocks = (first + count + block - 1) / block;
    *total = 0.0;
    for (int64_t one = 0; one < blocks; one++) *total += sums[one];
}
