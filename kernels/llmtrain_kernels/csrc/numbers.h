// Number formats that kernels read and write; arithmetic is fp32 throughout.
#pragma once
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(bf16 x) {
    uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline void store(float& to, float value) { to = value; }

// Rounds to nearest, ties to even. NaN stays NaN.
inline void store(bf16& to, float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    to.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// e^x to 2 ulp, without a branch, so that loops over it become vector code. Below -87.3 it gives 0 (no denormals),
// above 88.7 infinity; NaN stays NaN. Cody and Waite's reduction; the polynomial is Cephes' expf.
inline float exp_f32(float x) {
    float bounded = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
    // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
    float shifted = bounded * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: 2^128 alone is not a float.
    int32_t whole = static_cast<int32_t>(n), half = whole >> 1;
    uint32_t low = static_cast<uint32_t>(half + 127) << 23, high = static_cast<uint32_t>(whole - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &low, 4);
    std::memcpy(&b, &high, 4);
    return p * a * b;
}
