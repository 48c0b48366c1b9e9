// Causal attention on the fused QKV projection, and its gradient. The rotary embedding is applied while Q and K are
// read. The kernel works on tiles with an online softmax (FlashAttention-2, Dao, 2023, algorithms 1 and 2): it never
// stores the full score matrix, and it skips tiles above the diagonal. It copies Q, K and V once into fp32 tiles, in
// the memory order of the matrix products. Gradients are rotated back while they are written.
#include <algorithm>
#include <cmath>
#include <omp.h>

#include "numbers.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16, ROWS = 16;
#else
constexpr int64_t LANES = 8, ROWS = 8;
#endif
constexpr int64_t TILE = 64;
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// The region of a product that a tile on the diagonal needs. The causal mask makes the rest zero.
enum class Region { ALL, COLUMNS_UP_TO_ROW, INNER_UP_TO_ROW, INNER_FROM_ROW };

// C[ROWS, LANES] (+)= A @ B with A[m, k] at a[m * am + k * ak], B[k, n] at b[k * bk + n]. ROWS accumulators fit into
// the registers and hide the latency of multiply-add. Each takes one broadcast per k.
template <bool ADD>
inline void micro(int64_t inner, const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c,
                  int64_t cm) {
    Vector sum[ROWS];
    for (int m = 0; m < ROWS; m++) sum[m] = ADD ? *(const Vector*)(c + m * cm) : Vector{};
    for (int64_t k = 0; k < inner; k++) {
        Vector row = *(const Vector*)(b + k * bk);
        for (int m = 0; m < ROWS; m++) sum[m] += a[m * am + k * ak] * row;
    }
    for (int m = 0; m < ROWS; m++) *(Vector*)(c + m * cm) = sum[m];
}

// C[TILE, columns] (+)= A[TILE, inner] @ B[inner, columns]; columns is a multiple of LANES.
template <bool ADD>
void product(int64_t columns, int64_t inner, const float* a, int64_t am, int64_t ak, const float* b, int64_t bk,
             float* c, int64_t cm, Region region) {
    for (int64_t n = 0; n < columns; n += LANES)
        for (int64_t m = 0; m < TILE; m += ROWS) {
            if (region == Region::COLUMNS_UP_TO_ROW && n >= m + ROWS) continue;
            int64_t first = region == Region::INNER_FROM_ROW ? m : 0;
            int64_t last = region == Region::INNER_UP_TO_ROW ? m + ROWS : inner;
            micro<ADD>(last - first, a + m * am + first * ak, am, ak, b + first * bk + n, bk, c + m * cm + n, cm);
        }
}

struct Sizes {
    int64_t batch, sequence, heads, kv_heads, dim, half;
    int64_t padded_dim() const { return (dim + LANES - 1) / LANES * LANES; }
    int64_t padded_sequence() const { return (sequence + TILE - 1) / TILE * TILE; }
    int64_t plane() const { return padded_sequence() * padded_dim(); }
    int64_t width() const { return (heads + 2 * kv_heads) * dim; }
    int64_t group() const { return heads / kv_heads; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }
};

struct Rotary {
    const float *cos, *sin;  // [sequence, half]; half is 0 without a rotary embedding
};

// Read one head's row into `to`, scaled, and rotated if `rotate`. place: position in the sequence.
template <typename T>
inline void read_row(const T* from, float* to, int64_t place, float scale, bool rotate, const Sizes& s,
                     const Rotary& r) {
    int64_t half = rotate ? s.half : 0;
    const float *cos = r.cos + place * half, *sin = r.sin + place * half;
    for (int64_t d = 0; d < half; d++) {
        float first = load(from[d]) * scale, second = load(from[d + half]) * scale;
        to[d] = first * cos[d] - second * sin[d];
        to[d + half] = second * cos[d] + first * sin[d];
    }
    for (int64_t d = 2 * half; d < s.dim; d++) to[d] = load(from[d]) * scale;
}

// The transpose of read_row: propagates a gradient back through scale and rotation.
template <typename T>
inline void write_row(const float* from, T* to, int64_t place, float scale, bool rotate, const Sizes& s,
                      const Rotary& r) {
    int64_t half = rotate ? s.half : 0;
    const float *cos = r.cos + place * half, *sin = r.sin + place * half;
    for (int64_t d = 0; d < half; d++) {
        float first = from[d] * scale, second = from[d + half] * scale;
        store(to[d], first * cos[d] + second * sin[d]);
        store(to[d + half], second * cos[d] - first * sin[d]);
    }
    for (int64_t d = 2 * half; d < s.dim; d++) store(to[d], from[d] * scale);
}

// Read a head, whose rows are `stride` elements apart, into [padded_sequence, padded_dim]. The padding is zero.
template <typename T>
void read_plane(const T* from, int64_t stride, float* to, float scale, bool rotate, const Sizes& s, const Rotary& r) {
    int64_t width = s.padded_dim();
    for (int64_t place = 0; place < s.sequence; place++) {
        read_row(from + place * stride, to + place * width, place, scale, rotate, s, r);
        for (int64_t d = s.dim; d < width; d++) to[place * width + d] = 0.0f;
    }
    std::fill(to + s.sequence * width, to + s.plane(), 0.0f);
}

template <typename T>
void write_plane(const float* from, T* to, int64_t stride, float scale, bool rotate, const Sizes& s, const Rotary& r) {
    for (int64_t place = 0; place < s.sequence; place++)
        write_row(from + place * s.padded_dim(), to + place * stride, place, scale, rotate, s, r);
}

// Transpose each tile [TILE, padded_dim] of a plane to [padded_dim, TILE].
void transpose_tiles(const float* from, float* to, const Sizes& s) {
    int64_t width = s.padded_dim();
    for (int64_t base = 0; base < s.plane(); base += TILE * width)
        for (int64_t row = 0; row < TILE; row++)
            for (int64_t d = 0; d < width; d++) to[base + d * TILE + row] = from[base + row * width + d];
}

// Turn one row of base-2 scores into unnormalized weights, and update the row's running sum, maximum and output.
// seen: number of the tile's keys that the query attends to.
inline void softmax_row(float* scores, int64_t seen, float& largest, float& sum, float* mixed, int64_t width) {
    float top = largest;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < seen; k++) top = scores[k] > top ? scores[k] : top;
    float added = 0.0f, shrink = exp2_f32(largest - top);
#pragma omp simd reduction(+ : added)
    for (int64_t k = 0; k < seen; k++) {
        scores[k] = exp2_f32(scores[k] - top);
        added += scores[k];
    }
    for (int64_t k = seen; k < TILE; k++) scores[k] = 0.0f;
    if (top > largest)
        for (int64_t d = 0; d < width; d++) mixed[d] *= shrink;
    sum = sum * shrink + added;
    largest = top;
}

// Attention of all queries of one head to their keys (tiles [dim, key]) and values ([key, dim]). log_sums: base-2
// log-sum-exp of each query's scores; the backward pass recomputes the weights from it.
template <typename T>
void attend(const T* q, const float* keys, const float* values, T* mixed_out, float* log_sums, const Sizes& s,
            const Rotary& r) {
    int64_t width = s.padded_dim();
    alignas(64) float scores[TILE * TILE];
    float* queries = static_cast<float*>(__builtin_alloca_with_align(2 * TILE * width * 4, 512));
    float* mixed = queries + TILE * width;
    for (int64_t first = 0; first < s.sequence; first += TILE) {
        int64_t rows = std::min(TILE, s.sequence - first);
        float largest[TILE], sum[TILE];
        std::fill(largest, largest + TILE, -1e30f);
        std::fill(sum, sum + TILE, 0.0f);
        std::fill(queries, queries + 2 * TILE * width, 0.0f);
        for (int64_t row = 0; row < rows; row++)
            read_row(q + (first + row) * s.width(), queries + row * width, first + row, s.scale() * LOG2_E, true, s, r);
        for (int64_t key = 0; key <= first; key += TILE) {
            bool diagonal = key == first;
            product<false>(TILE, s.dim, queries, width, 1, keys + key * width, TILE, scores, TILE,
                           diagonal ? Region::COLUMNS_UP_TO_ROW : Region::ALL);
            for (int64_t row = 0; row < TILE; row++)
                softmax_row(scores + row * TILE, diagonal ? row + 1 : TILE, largest[row], sum[row],
                            mixed + row * width, width);
            product<true>(width, TILE, scores, TILE, 1, values + key * width, width, mixed, width,
                          diagonal ? Region::INNER_UP_TO_ROW : Region::ALL);
        }
        for (int64_t row = 0; row < rows; row++) {
            float share = 1.0f / sum[row];
            T* to = mixed_out + (first + row) * s.heads * s.dim;
            for (int64_t d = 0; d < s.dim; d++) store(to[d], mixed[row * width + d] * share);
            log_sums[first + row] = largest[row] + std::log2(sum[row]);
        }
    }
}

template <typename T>
void forward(const T* qkv, const Rotary& r, T* mixed, float* log_sums, float* workspace, int64_t threads,
             const Sizes& s) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < s.batch * s.kv_heads; item++) {
        int64_t row = item / s.kv_heads, kv = item % s.kv_heads;
        float* values = workspace + omp_get_thread_num() * 2 * s.plane();
        float* keys = values + s.plane();
        const T* from = qkv + row * s.sequence * s.width();
        // The values' plane holds the keys until they are transposed.
        read_plane(from + (s.heads + kv) * s.dim, s.width(), values, 1.0f, true, s, r);
        transpose_tiles(values, keys, s);
        read_plane(from + (s.heads + s.kv_heads + kv) * s.dim, s.width(), values, 1.0f, false, s, r);
        for (int64_t head = kv * s.group(); head < (kv + 1) * s.group(); head++)
            attend(from + head * s.dim, keys, values, mixed + (row * s.sequence * s.heads + head) * s.dim,
                   log_sums + (row * s.heads + head) * s.sequence, s, r);
    }
}

// Workspace of the backward pass for one key/value head: inputs as read, transposed tiles, and gradient sums.
struct Planes {
    float *keys, *keys_t, *values_t, *grad_keys, *grad_values, *queries, *grad_mixed, *grad_queries;
    static constexpr int64_t COUNT = 8;
    Planes(float* base, int64_t plane)
        : keys(base), keys_t(base + plane), values_t(base + 2 * plane), grad_keys(base + 3 * plane),
          grad_values(base + 4 * plane), queries(base + 5 * plane), grad_mixed(base + 6 * plane),
          grad_queries(base + 7 * plane) {}
};

// The gradients of one tile of queries against one tile of keys.
void tile_gradients(const Planes& p, int64_t first, int64_t key, const float* log_sums, const float* deltas,
                    const Sizes& s) {
    alignas(64) float weights[TILE * TILE], grads[TILE * TILE];
    int64_t width = s.padded_dim(), query = first * width, at = key * width;
    bool diagonal = key == first;
    Region outer = diagonal ? Region::COLUMNS_UP_TO_ROW : Region::ALL;
    product<false>(TILE, s.dim, p.queries + query, width, 1, p.keys_t + at, TILE, weights, TILE, outer);
    product<false>(TILE, s.dim, p.grad_mixed + query, width, 1, p.values_t + at, TILE, grads, TILE, outer);
    for (int64_t row = 0; row < TILE; row++) {
        float *weight = weights + row * TILE, *grad = grads + row * TILE;
        float log_sum = first + row < s.sequence ? log_sums[first + row] : 0.0f;
        int64_t seen = diagonal ? row + 1 : TILE;
#pragma omp simd
        for (int64_t k = 0; k < seen; k++) {
            weight[k] = exp2_f32(weight[k] - log_sum);
            grad[k] = weight[k] * (grad[k] - deltas[row]);
        }
        for (int64_t k = seen; k < TILE; k++) weight[k] = grad[k] = 0.0f;
    }
    Region by_key = diagonal ? Region::INNER_FROM_ROW : Region::ALL;
    Region by_query = diagonal ? Region::INNER_UP_TO_ROW : Region::ALL;
    product<true>(width, TILE, weights, 1, TILE, p.grad_mixed + query, width, p.grad_values + at, width, by_key);
    product<true>(width, TILE, grads, 1, TILE, p.queries + query, width, p.grad_keys + at, width, by_key);
    product<true>(width, TILE, grads, TILE, 1, p.keys + at, width, p.grad_queries + query, width, by_query);
}

template <typename T>
void head_gradients(const Planes& p, const T* mixed, const float* log_sums, const Sizes& s) {
    int64_t width = s.padded_dim();
    std::fill(p.grad_queries, p.grad_queries + s.plane(), 0.0f);
    for (int64_t first = 0; first < s.sequence; first += TILE) {
        float deltas[TILE] = {};
        for (int64_t row = 0; row < std::min(TILE, s.sequence - first); row++) {
            const T* out = mixed + (first + row) * s.heads * s.dim;
            const float* grad = p.grad_mixed + (first + row) * width;
            float delta = 0.0f;
#pragma omp simd reduction(+ : delta)
            for (int64_t d = 0; d < s.dim; d++) delta += grad[d] * load(out[d]);
            deltas[row] = delta;
        }
        for (int64_t key = 0; key <= first; key += TILE) tile_gradients(p, first, key, log_sums, deltas, s);
    }
}

template <typename T>
void backward(const T* qkv, const Rotary& r, const T* mixed, const float* log_sums, const T* grad_mixed, T* grad_qkv,
              float* workspace, int64_t threads, const Sizes& s) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < s.batch * s.kv_heads; item++) {
        Planes p(workspace + omp_get_thread_num() * Planes::COUNT * s.plane(), s.plane());
        int64_t row = item / s.kv_heads, kv = item % s.kv_heads, stride = s.width(), out = s.heads * s.dim;
        const T* from = qkv + row * s.sequence * stride;
        T* to = grad_qkv + row * s.sequence * stride;
        int64_t key_at = (s.heads + kv) * s.dim, value_at = key_at + s.kv_heads * s.dim;
        read_plane(from + value_at, stride, p.keys, 1.0f, false, s, r);
        transpose_tiles(p.keys, p.values_t, s);
        read_plane(from + key_at, stride, p.keys, 1.0f, true, s, r);
        transpose_tiles(p.keys, p.keys_t, s);
        std::fill(p.grad_keys, p.grad_keys + 2 * s.plane(), 0.0f);
        for (int64_t head = kv * s.group(); head < (kv + 1) * s.group(); head++) {
            int64_t at = row * s.sequence * out + head * s.dim;
            read_plane(from + head * s.dim, stride, p.queries, s.scale() * LOG2_E, true, s, r);
            read_plane(grad_mixed + at, out, p.grad_mixed, 1.0f, false, s, r);
            head_gradients(p, mixed + at, log_sums + (row * s.heads + head) * s.sequence, s);
            write_plane(p.grad_queries, to + head * s.dim, stride, s.scale(), true, s, r);
        }
        // The queries include scale * log2(e), but the keys' gradient needs the scale alone: log2(e) * LN_2 = 1.
        write_plane(p.grad_keys, to + key_at, stride, LN_2, true, s, r);
        write_plane(p.grad_values, to + value_at, stride, 1.0f, false, s, r);
    }
}

}  // namespace

extern "C" {

// Write the number of fp32 workspace elements that one thread needs: floats[0] forward, floats[1] backward.
void attention_workspace(int64_t* floats, int64_t sequence, int64_t dim) {
    Sizes s{1, sequence, 1, 1, dim, 0};
    floats[0] = 2 * s.plane();
    floats[1] = Planes::COUNT * s.plane();
}

// qkv: [batch, sequence, heads + 2 kv_heads, dim], bf16 or fp32. cos, sin: fp32 [sequence, half].
// mixed (the output): [batch, sequence, heads, dim], dtype of qkv. log_sums: fp32 [batch, heads, sequence].
void attention_forward(const void* qkv, const float* cos, const float* sin, void* mixed, float* log_sums,
                       float* workspace, int64_t threads, int64_t is_bf16, int64_t batch, int64_t sequence,
                       int64_t heads, int64_t kv_heads, int64_t dim, int64_t half) {
    Sizes s{batch, sequence, heads, kv_heads, dim, half};
    if (is_bf16)
        forward((const bf16*)qkv, {cos, sin}, (bf16*)mixed, log_sums, workspace, threads, s);
    else
        forward((const float*)qkv, {cos, sin}, (float*)mixed, log_sums, workspace, threads, s);
}

void attention_backward(const void* qkv, const float* cos, const float* sin, const void* mixed, const float* log_sums,
                        const void* grad_mixed, void* grad_qkv, float* workspace, int64_t threads, int64_t is_bf16,
                        int64_t batch, int64_t sequence, int64_t heads, int64_t kv_heads, int64_t dim, int64_t half) {
    Sizes s{batch, sequence, heads, kv_heads, dim, half};
    if (is_bf16)
        backward((const bf16*)qkv, {cos, sin}, (const bf16*)mixed, log_sums, (const bf16*)grad_mixed, (bf16*)grad_qkv,
                 workspace, threads, s);
    else
        backward((const float*)qkv, {cos, sin}, (const float*)mixed, log_sums, (const float*)grad_mixed,
                 (float*)grad_qkv, workspace, threads, s);
}
}
