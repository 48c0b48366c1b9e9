// The order of the additions in a sum of squares, which fixes its bits. Every block of a flat buffer has a partial sum.
// Inside a block, number i is added to lane i modulo SQUARE_LANES. Pairs of lanes are then added until one is left.
#pragma once
#include <cstdint>

constexpr int64_t SQUARE_LANES = 16;

inline double sum_of_lanes(double (&lanes)[SQUARE_LANES]) {
    for (int64_t width = SQUARE_LANES / 2; width > 0; width /= 2)
        for (int64_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}
