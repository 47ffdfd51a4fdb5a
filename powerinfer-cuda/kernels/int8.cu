// Products of block weights with vectors of 8 bits (`quantize_q8`): four products an instruction, at the price of
// rounding the vector. README.md beside this file has the argument lists and launch rules.
#include "products.cuh"

// A chunk as integers: `first` and `second` hold 4 weights each. A weight is scale * q - min, each of the two words with
// its own scale and minimum.
struct IntChunk {
    int first, second;
    float scale[2], min[2];
};

DEVICE IntChunk int_chunk(Weights_q8_0, const u8* row, int i) {
    const u8* block = row + (u64)(i / 4) * 34;
    const u8* p = block + 2 + i % 4 * 8;
    float d = load_half(block);
    return {(int)load_u32_by_2(p), (int)load_u32_by_2(p + 4), {d, d}, {0.0f, 0.0f}};
}

DEVICE IntChunk int_chunk(Weights_q4_0, const u8* row, int i) {
    const u8* block = row + (u64)(i / 4) * 18;
    float d = load_half(block);
    u32 q = load_u32_by_2(block + 2 + i % 4 * 4);
    return {(int)(q & 0x0f0f0f0fu), (int)(q >> 4 & 0x0f0f0f0fu), {d, d}, {8.0f * d, 8.0f * d}};
}

DEVICE IntChunk int_chunk(Weights_q4_k, const u8* row, int i) {
    const u8* block = row + (u64)(i / 32) * 144;
    int a = i % 32 / 8, c = i % 8 * 4, scale, min;
    float d = load_half(block), dmin = load_half(block + 2);
    u32 q = load_u32_by_2(block + 16 + 32 * a + c);
    IntChunk chunk = {(int)(q & 0x0f0f0f0fu), (int)(q >> 4 & 0x0f0f0f0fu), {}, {}};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        Weights_q4_k::group(block + 4, 2 * a + k, scale, min);
        chunk.scale[k] = d * (float)scale;
        chunk.min[k] = dmin * (float)min;
    }
    return chunk;
}

DEVICE IntChunk int_chunk(Weights_q6_k, const u8* row, int i) {
    const u8* block = row + (u64)(i / 32) * 210;
    int a = i % 32 / 16, b = i % 16 / 8, c = i % 8 * 4;
    u32 low = load_u32_by_2(block + 64 * a + 32 * b + c);
    u32 high = load_u32_by_2(block + 128 + 32 * a + c) >> (2 * b);
    const i8* scales = (const i8*)block + 192 + 8 * a + 2 * b + c / 16;
    float d = load_half(block + 208), s0 = d * (float)scales[0], s1 = d * (float)scales[4];
    u32 first = (low & 0x0f0f0f0fu) | (high << 4 & 0x30303030u);
    u32 second = (low >> 4 & 0x0f0f0f0fu) | (high & 0x30303030u);
    return {(int)first, (int)second, {s0, s1}, {32.0f * s0, 32.0f * s1}};
}

// Four 8-bit values of a vector, with its scale there.
struct IntQuad {
    int values;
    float scale;
};

DEVICE IntQuad int_quad(const i8* q, const float* d, int column) {
    return {*(const int*)(q + column), d[column / 32]};
}

template <class Weights, int T>
DEVICE void matvec_i8(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                      int n_tokens, int y_stride, int flags) {
    const int N = ROWS * T;
    int first = first_row(), token = blockIdx.y * TILE, lane = threadIdx.x % 32;
    if (first >= n_out) {
        return;
    }
    const u8* rows[ROWS];
    two_rows(w, Weights::row_bytes(n_in), first, n_out, rows);
    float sums[N];
#pragma unroll
    for (int p = 0; p < N; p++) {
        sums[p] = 0.0f;
    }
#pragma unroll(T == 1 ? 2 : 1)
    for (int i = lane; i < n_in / 8; i += 32) {
        Columns columns = Weights::columns(i);
        IntChunk chunks[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            chunks[r] = int_chunk(Weights(), rows[r], i);
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            u64 at = (u64)min(token + t, n_tokens - 1) * n_in;
            IntQuad a = int_quad(q + at, d + at / 32, columns.first), b = int_quad(q + at, d + at / 32, columns.second);
            // Sums of the vector's values, for the minima.
            float sum_a = a.scale * (float)dot4(a.values, 0x01010101, 0);
            float sum_b = b.scale * (float)dot4(b.values, 0x01010101, 0);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float& sum = sums[r * T + t];
                float dot_a = a.scale * (float)dot4(chunks[r].first, a.values, 0);
                float dot_b = b.scale * (float)dot4(chunks[r].second, b.values, 0);
                sum = fmaf(chunks[r].scale[0], dot_a, sum);
                sum = fmaf(chunks[r].scale[1], dot_b, sum);
                sum = fmaf(-chunks[r].min[0], sum_a, sum);
                sum = fmaf(-chunks[r].min[1], sum_b, sum);
            }
        }
    }
    float sum = warp_sums<N>(sums);
    int o = first + pair_of<N>() / T, t = token + pair_of<N>() % T;
    if (is_first_of_pair<N>() && o < n_out && t < n_tokens) {
        store(y + (u64)t * y_stride + o, sum, bias ? bias[o] : 0.0f, flags);
    }
}

template <class Weights>
DEVICE void matvec_i8(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                      int n_tokens, int y_stride, int flags) {
    if (n_tokens - (int)blockIdx.y * TILE == 1) {
        matvec_i8<Weights, 1>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
    } else {
        matvec_i8<Weights, TILE>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
    }
}

KERNEL(128, matvec_i8_q8_0)(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                            int n_tokens, int y_stride, int flags) {
    matvec_i8<Weights_q8_0>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
}

KERNEL(128, matvec_i8_q4_0)(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                            int n_tokens, int y_stride, int flags) {
    matvec_i8<Weights_q4_0>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
}

KERNEL(128, matvec_i8_q4_k)(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                            int n_tokens, int y_stride, int flags) {
    matvec_i8<Weights_q4_k>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
}

KERNEL(128, matvec_i8_q6_k)(const u8* w, const i8* q, const float* d, const float* bias, float* y, int n_out, int n_in,
                            int n_tokens, int y_stride, int flags) {
    matvec_i8<Weights_q6_k>(w, q, d, bias, y, n_out, n_in, n_tokens, y_stride, flags);
}

#ifdef EMULATED
EMULATED_MODULE(int8) {
    EMULATED_KERNEL(matvec_i8_q8_0);
    EMULATED_KERNEL(matvec_i8_q4_0);
    EMULATED_KERNEL(matvec_i8_q4_k);
    EMULATED_KERNEL(matvec_i8_q6_k);
}
#endif
