// RMSNorm (Zhang and Sennrich, 2019, section 4) and its gradient, one pass each.
#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace {

// inverses: fp32 [rows], 1 / root mean square of each row.
template <typename T>
void forward(const T* x, const T* weight, T* y, float* inverses, float eps, int64_t rows, int64_t width,
             int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * width;
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += load(from[i]) * load(from[i]);
        float inverse = 1.0f / std::sqrt(squares / width + eps);
        inverses[row] = inverse;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) store(y[row * width + i], load(from[i]) * inverse * load(weight[i]));
    }
}

// partial: fp32 [threads, width]; each thread sums the weight's gradient over its rows there.
template <typename T>
void backward(const T* x, const T* weight, const float* inverses, const T* grad, T* grad_x, float* partial,
              int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        float* sums = partial + part * width;
        std::fill(sums, sums + width, 0.0f);
        for (int64_t row = rows * part / threads; row < rows * (part + 1) / threads; row++) {
            const T *from = x + row * width, *above = grad + row * width;
            float inverse = inverses[row], along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < width; i++) {
                float normal = load(from[i]) * inverse, product = load(above[i]) * normal;
                sums[i] += product;
                along += product * load(weight[i]);
            }
            along /= width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                store(grad_x[row * width + i],
                      inverse * (load(above[i]) * load(weight[i]) - load(from[i]) * inverse * along));
        }
    }
}

}  // namespace

extern "C" {

// x, y and their gradients: [rows, width]; weight: [width]. All fp32 or all bf16.
void rms_norm_forward(const void* x, const void* weight, void* y, float* inverses, float eps, int64_t rows,
                      int64_t width, int64_t is_bf16, int64_t threads) {
    if (is_bf16)
        forward((const bf16*)x, (const bf16*)weight, (bf16*)y, inverses, eps, rows, width, threads);
    else
        forward((const float*)x, (const float*)weight, (float*)y, inverses, eps, rows, width, threads);
}

void rms_norm_backward(const void* x, const void* weight, const float* inverses, const void* grad, void* grad_x,
                       float* partial, int64_t rows, int64_t width, int64_t is_bf16, int64_t threads) {
    if (is_bf16)
        backward((const bf16*)x, (const bf16*)weight, inverses, (const bf16*)grad, (bf16*)grad_x, partial, rows,
                 width, threads);
    else
        backward((const float*)x, (const float*)weight, inverses, (const float*)grad, (float*)grad_x, partial, rows,
                 width, threads);
}
}
