// The sum of squares of fp32 numbers, in fp64. The square of an fp32 number is exact in fp64, so fused and separate
// operations give the same bits. Lanes and blocks fix the order of additions.
#include <algorithm>
#include <cstdint>

#include "squares.h"

namespace {

constexpr int64_t LANES = SQUARE_LANES;

double block_sum(const float* x, int64_t count) {
    double lanes[LANES] = {};
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
    for (int64_t i = whole; i < count; i++) lanes[i - whole] += (double)x[i] * (double)x[i];
    return sum_of_lanes(lanes);
}

}  // namespace

extern "C" {

// x: fp32 [count]. first: position of x[0] in its block. sums: fp64, one per block that x touches.
void squared_sum(const float* x, double* sums, double* total, int64_t count, int64_t first, int64_t block,
                 int64_t threads) {
    int64_t blocks = (first + count + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 65536)
    for (int64_t one = 0; one < blocks; one++) {
        int64_t start = std::max<int64_t>(one * block - first, 0);
        int64_t end = std::min(count, (one + 1) * block - first);
        sums[one] = block_sum(x + start, end - start);
    }
    *total = 0.0;
    for (int64_t one = 0; one < blocks; one++) *total += sums[one];
}
}
