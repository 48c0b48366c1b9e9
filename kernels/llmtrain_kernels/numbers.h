// Number formats of kernels' inputs and outputs, and fp32 functions. All arithmetic is fp32. Nothing here branches, so
// that the compiler can vectorize loops.
#pragma once
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

inline float bits_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float load(float x) { return x; }

inline float load(bf16 x) { return bits_as_float(static_cast<uint32_t>(x.bits) << 16); }

inline void store(float& to, float value) { to = value; }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(bf16& to, float value) {
    uint32_t bits = float_as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// 2^x, within 2 ulp for x in [-126, 127]; x outside is clamped. NaN stays NaN. The nearest integer goes into the
// exponent, the remainder, in [-1/2, 1/2], into a Taylor series.
inline float exp2_f32(float x) {
    float bounded = x < -126.0f ? -126.0f : (x > 127.0f ? 127.0f : x);
    // Adding 1.5 * 2^23 puts the nearest integer into the low bits.
    float shifted = bounded + 12582912.0f;
    float r = bounded - (shifted - 12582912.0f);
    float p = 1.52527338e-5f;
    p = p * r + 1.54035304e-4f;
    p = p * r + 1.33335581e-3f;
    p = p * r + 9.61812911e-3f;
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
    return p * bits_as_float((float_as_bits(shifted) + 127) << 23);
}

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

inline float exp_f32(float x) { return exp2_f32(x * LOG2_E); }
