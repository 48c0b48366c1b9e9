// Cross-entropy of rows of logits. The gradient overwrites the logits.
#include <cmath>

#include "numbers.h"

namespace {

template <typename T>
void run(T* logits, const int64_t* targets, float* losses, bool needs_grad, int64_t rows, int64_t vocab,
         int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        T* at = logits + row * vocab;
        float top = -INFINITY, sum = 0.0f, target = load(at[targets[row]]);
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < vocab; i++) {
            float logit = load(at[i]);
            top = logit > top ? logit : top;
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < vocab; i++) sum += exp_f32(load(at[i]) - top);
        losses[row] = top + std::log(sum) - target;
        if (!needs_grad) continue;
        float share = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < vocab; i++) store(at[i], exp_f32(load(at[i]) - top) * share);
        store(at[targets[row]], exp_f32(target - top) * share - 1.0f);
    }
}

}  // namespace

extern "C" {

// logits: fp32 or bf16 [rows, vocab]; overwritten by softmax - one_hot(targets) if needs_grad. losses: fp32 [rows].
void cross_entropy_rows(void* logits, const int64_t* targets, float* losses, int64_t needs_grad, int64_t rows,
                        int64_t vocab, int64_t is_bf16, int64_t threads) {
    if (is_bf16)
        run((bf16*)logits, targets, losses, needs_grad, rows, vocab, threads);
    else
        run((float*)logits, targets, losses, needs_grad, rows, vocab, threads);
}
}
