// Exact GELU, tanh GELU, SwiGLU and their gradients. Each function makes one pass over its input.
#include "numbers.h"

namespace {

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// Tanh GELU is x * (1 + tanh(z)) / 2 = x * sigmoid(2z), with 2z = SCALE * (x + CUBE * x^3). SCALE is 2 sqrt(2 / pi).
constexpr float SCALE = 1.59576912f, CUBE = 0.044715f;

struct TanhGelu {
    static float value(float x) { return x * sigmoid(SCALE * (x + CUBE * x * x * x)); }

    static float slope(float x) {
        float s = sigmoid(SCALE * (x + CUBE * x * x * x));
        return s + x * s * (1.0f - s) * SCALE * (1.0f + 3.0f * CUBE * x * x);
    }
};

// Density and cumulative distribution of the normal distribution (Abramowitz and Stegun, 7.1.26; error below 1e-7).
struct Normal {
    float density, integral;

    explicit Normal(float x) {
        float bell = exp_f32(-0.5f * x * x), t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * (x < 0.0f ? -x : x));
        float series = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
        float tail = 0.5f * series * bell;
        density = 0.39894228f * bell;
        integral = x < 0.0f ? tail : 1.0f - tail;
    }
};

struct Gelu {
    static float value(float x) { return x * Normal(x).integral; }

    static float slope(float x) {
        Normal normal(x);
        return normal.integral + x * normal.density;
    }
};

template <typename Form, typename T>
void apply(const T* x, T* y, int64_t size, int64_t threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i++) store(y[i], Form::value(load(x[i])));
}

template <typename Form, typename T>
void gradient(const T* x, const T* grad, T* grad_x, int64_t size, int64_t threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i++) store(grad_x[i], load(grad[i]) * Form::slope(load(x[i])));
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

// y and grad: [rows, width], fp32 or bf16. x and grad_x: the same; for SwiGLU [rows, 2 width] with the gate first.
// kind: 0 exact GELU, 1 tanh GELU, 2 SwiGLU.
void activation_forward(const void* x, void* y, int64_t kind, int64_t rows, int64_t width, int64_t is_bf16,
                        int64_t threads) {
    auto run = [&](auto* x, auto* y) {
        if (kind == 0) apply<Gelu>(x, y, rows * width, threads);
        if (kind == 1) apply<TanhGelu>(x, y, rows * width, threads);
        if (kind == 2) swiglu(x, y, rows, width, threads);
    };
    is_bf16 ? run((const bf16*)x, (bf16*)y) : run((const float*)x, (float*)y);
}

void activation_backward(const void* x, const void* grad, void* grad_x, int64_t kind, int64_t rows, int64_t width,
                         int64_t is_bf16, int64_t threads) {
    auto run = [&](auto* x, auto* grad, auto* grad_x) {
        if (kind == 0) gradient<Gelu>(x, grad, grad_x, rows * width, threads);
        if (kind == 1) gradient<TanhGelu>(x, grad, grad_x, rows * width, threads);
        if (kind == 2) swiglu_gradient(x, grad, grad_x, rows, width, threads);
    };
    is_bf16 ? run((const bf16*)x, (const bf16*)grad, (bf16*)grad_x)
            : run((const float*)x, (const float*)grad, (float*)grad_x);
}
}
