// GELU in its tanh form, SwiGLU, and their gradients, one pass each.
#include "numbers.h"

namespace {

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// x * sigmoid(2z) is x * (1 + tanh(z)) / 2.
constexpr float SCALE = 1.59576912f, CUBE = 0.044715f;  // 2 sqrt(2 / pi), and the form's own

inline float gelu(float x) { return x * sigmoid(SCALE * (x + CUBE * x * x * x)); }

inline float gelu_slope(float x) {
    float s = sigmoid(SCALE * (x + CUBE * x * x * x));
    return s + x * s * (1.0f - s) * SCALE * (1.0f + 3.0f * CUBE * x * x);
}

template <typename T>
void gelu(const T* x, T* y, int64_t size, int64_t threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i++) store(y[i], gelu(load(x[i])));
}

template <typename T>
void gelu_gradient(const T* x, const T* grad, T* grad_x, int64_t size, int64_t threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i++) store(grad_x[i], load(grad[i]) * gelu_slope(load(x[i])));
}

template <typename T>
void swiglu(const T* x, T* y, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            store(y[row * width + i], load(gate[i]) * sigmoid(load(gate[i])) * load(up[i]));
    }
}

template <typename T>
void swiglu_gradient(const T* x, const T* grad, T* grad_x, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width, *from = grad + row * width;
        T *grad_gate = grad_x + row * 2 * width, *grad_up = grad_gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = load(gate[i]), s = sigmoid(g), d = load(from[i]);
            store(grad_gate[i], d * load(up[i]) * s * (1.0f + g * (1.0f - s)));
            store(grad_up[i], d * g * s);
        }
    }
}

}  // namespace

extern "C" {

// y and its gradient: [rows, width], fp32 or bf16; x and its gradient: the same, or, gated (SwiGLU, else GELU in its
// tanh form), [rows, 2 width] with the gate first.
void activation_forward(const void* x, void* y, int64_t gated, int64_t rows, int64_t width, int64_t is_bf16,
                        int64_t threads) {
    auto run = [&](auto* x, auto* y) {
        gated ? swiglu(x, y, rows, width, threads) : gelu(x, y, rows * width, threads);
    };
    is_bf16 ? run((const bf16*)x, (bf16*)y) : run((const float*)x, (float*)y);
}

void activation_backward(const void* x, const void* grad, void* grad_x, int64_t gated, int64_t rows, int64_t width,
                         int64_t is_bf16, int64_t threads) {
    auto run = [&](auto* x, auto* grad, auto* grad_x) {
        gated ? swiglu_gradient(x, grad, grad_x, rows, width, threads)
              : gelu_gradient(x, grad, grad_x, rows * width, threads);
    };
    is_bf16 ? run((const bf16*)x, (const bf16*)grad, (bf16*)grad_x)
            : run((const float*)x, (const float*)grad, (float*)grad_x);
}
}
