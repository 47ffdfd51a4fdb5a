// Kernels that read no weight matrix. README.md beside this file has the argument lists and launch rules.
#include "common.cuh"

// ---- norms: a block a row ----

KERNEL(256, rms_norm)(const float* x, const float* weight, const float* bias, float* y, int n, int n_rows,
                      float eps) {
    x += (u64)blockIdx.x * n;
    y += (u64)blockIdx.x * n;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        squares = fmaf(x[i], x[i], squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / (float)n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = x[i] * scale * weight[i] + (bias ? bias[i] : 0.0f);
    }
}

KERNEL(256, layer_norm)(const float* x, const float* weight, const float* bias, float* y, int n, int n_rows,
                        float eps) {
    x += (u64)blockIdx.x * n;
    y += (u64)blockIdx.x * n;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sum += x[i];
    }
    float mean = block_sum(sum) / (float)n;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float d = x[i] - mean;
        squares = fmaf(d, d, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / (float)n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
    }
}

// ---- rotation: a block a head and token ----

KERNEL(64, rope)(float* x, const u32* positions, const float* freqs, int n_heads, int head_dim, int n_rot, int kind,
                 float magnitude, int x_stride, int n_tokens) {
    int head = blockIdx.x, token = blockIdx.y, n_pairs = n_rot / 2;
    float* h = x + (u64)token * x_stride + (u64)head * head_dim;
    for (int pair = threadIdx.x; pair < n_pairs; pair += blockDim.x) {
        float angle = (float)positions[token] * freqs[pair], sine, cosine;
        sincosf(angle, &sine, &cosine);
        sine *= magnitude;
        cosine *= magnitude;
        int i = kind == 0 ? 2 * pair : pair, j = kind == 0 ? 2 * pair + 1 : pair + n_pairs;
        float a = h[i], b = h[j];
        h[i] = a * cosine - b * sine;
        h[j] = a * sine + b * cosine;
    }
}

// ---- keys and values ----

DEVICE float kv_load(const float* p) {
    return *p;
}

DEVICE float kv_load(const u16* p) {
    return half_to_float(*p);
}

DEVICE void kv_store(float* p, float v) {
    *p = v;
}

DEVICE void kv_store(u16* p, float v) {
    *p = float_to_half(v);
}

template <class Kv>
DEVICE void kv_append(const float* k, const float* v, const u64* k_caches, const u64* v_caches, const u32* positions,
                      int kv_dim, int k_stride, int v_stride) {
    int token = blockIdx.x;
    u64 at = (u64)positions[token] * kv_dim;
    Kv* to_k = (Kv*)k_caches[token] + at;
    Kv* to_v = (Kv*)v_caches[token] + at;
    for (int i = threadIdx.x; i < kv_dim; i += blockDim.x) {
        kv_store(to_k + i, k[(u64)token * k_stride + i]);
        kv_store(to_v + i, v[(u64)token * v_stride + i]);
    }
}

KERNEL(128, kv_append_f16)(const float* k, const float* v, const u64* k_caches, const u64* v_caches,
                           const u32* positions, int kv_dim, int k_stride, int v_stride, int n_tokens) {
    kv_append<u16>(k, v, k_caches, v_caches, positions, kv_dim, k_stride, v_stride);
}

KERNEL(128, kv_append_f32)(const float* k, const float* v, const u64* k_caches, const u64* v_caches,
                           const u32* positions, int kv_dim, int k_stride, int v_stride, int n_tokens) {
    kv_append<float>(k, v, k_caches, v_caches, positions, kv_dim, k_stride, v_stride);
}

// ---- attention: a block takes a span of positions for up to 8 heads that share keys ----

// Positions of a span. Fixed, so that a token's sums do not depend on the launch.
#define SPAN 256
// Heads of a block.
#define HEADS 8
#define MAX_HEAD_DIM 256
// Warps of a block.
#define WARPS 4
// Threads that share the product with one key.
#define KEY_LANES 8

DEVICE void kv_load4(const float* p, bool whole, float (&out)[4]) {
    if (whole) {
        Quad q = load_quad(p);
        out[0] = q.v[0];
        out[1] = q.v[1];
        out[2] = q.v[2];
        out[3] = q.v[3];
    } else {
        out[0] = p[0];
        out[1] = p[1];
        out[2] = p[2];
        out[3] = p[3];
    }
}

DEVICE void kv_load4(const u16* p, bool whole, float (&out)[4]) {
    u64 four = whole ? *(const u64*)p : (u64)p[0] | (u64)p[1] << 16 | (u64)p[2] << 32 | (u64)p[3] << 48;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = half_to_float((u16)(four >> (16 * i)));
    }
}

template <class Kv>
DEVICE void kv_load_up_to_4(const Kv* p, bool whole, int n, float (&out)[4]) {
    if (n >= 4) {
        kv_load4(p, whole, out);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = i < n ? kv_load(p + i) : 0.0f;
        }
    }
}

template <class Kv>
DEVICE void attention(const float* q, const u64* k_caches, const u64* v_caches, const u32* positions, float* part,
                      int n_head, int n_head_kv, int head_dim, int n_spans, int q_stride, float scale) {
    SHARED(float, queries, HEADS * MAX_HEAD_DIM);
    SHARED(float, scores, HEADS * SPAN);
    int heads_per_kv = n_head / n_head_kv, groups = (heads_per_kv + HEADS - 1) / HEADS;
    int kv_head = blockIdx.x / groups, group = blockIdx.x % groups;
    int head0 = kv_head * heads_per_kv + group * HEADS;
    int n = min(HEADS, heads_per_kv - group * HEADS);
    int span = blockIdx.y, token = blockIdx.z, first = span * SPAN;
    int length = min(SPAN, (int)positions[token] + 1 - first);
    if (length <= 0) {
        return;
    }
    int kv_dim = n_head_kv * head_dim, tid = threadIdx.x;
    const Kv* keys = (const Kv*)k_caches[token] + (u64)first * kv_dim + kv_head * head_dim;
    const Kv* values = (const Kv*)v_caches[token] + (u64)first * kv_dim + kv_head * head_dim;
    const float* from = q + (u64)token * q_stride + (u64)head0 * head_dim;
    for (int i = tid; i < n * head_dim; i += blockDim.x) {
        queries[i] = from[i];
    }
    __syncthreads();

    // Scores: eight threads a key.
    bool whole = head_dim % 4 == 0 && ((k_caches[token] | v_caches[token]) & 15) == 0;
    int lane = tid % KEY_LANES, n_keys = blockDim.x / KEY_LANES, n_quads = head_dim / 4;
    for (int p0 = 0; p0 < length; p0 += n_keys) {
        int p = p0 + tid / KEY_LANES;
        const Kv* key = keys + (u64)min(p, length - 1) * kv_dim;
        float dots[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (int c = lane; c < n_quads; c += KEY_LANES) {
            float k[4];
            kv_load4(key + 4 * c, whole, k);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < n) {
                    const float* query = queries + h * head_dim + 4 * c;
                    for (int i = 0; i < 4; i++) {
                        dots[h] = fmaf(k[i], query[i], dots[h]);
                    }
                }
            }
        }
        for (int i = 4 * n_quads + lane; i < head_dim; i += KEY_LANES) {
            float k = kv_load(key + i);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < n) {
                    dots[h] = fmaf(k, queries[h * head_dim + i], dots[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h < n) {
                for (int offset = KEY_LANES / 2; offset > 0; offset /= 2) {
                    dots[h] += __shfl_xor_sync(FULL_WARP, dots[h], offset);
                }
                if (lane == 0 && p < length) {
                    scores[h * SPAN + p] = dots[h] * scale;
                }
            }
        }
    }
    __syncthreads();

    // Exponents, with their maximum and sum.
    u64 part_len = (u64)head_dim + 2;
    float* out = part + (((u64)token * n_head + head0) * n_spans + span) * part_len;
    for (int h = 0; h < n; h++) {
        float* s = scores + h * SPAN;
        float top = negative_infinity();
        for (int p = tid; p < length; p += blockDim.x) {
            top = fmaxf(top, s[p]);
        }
        top = block_max(top);
        float sum = 0.0f;
        for (int p = tid; p < length; p += blockDim.x) {
            float e = expf(s[p] - top);
            s[p] = e;
            sum += e;
        }
        sum = block_sum(sum);
        if (tid == 0) {
            float* to = out + (u64)h * n_spans * part_len;
            to[head_dim] = top;
            to[head_dim + 1] = sum;
        }
    }
    // All exponents were written before the barriers of the last sum.

    // Values: a lane four elements, a warp every fourth position; the warps are added in order.
    int warp = tid / 32;
    for (int i0 = 0; i0 < head_dim; i0 += 128) {
        int i = i0 + tid % 32 * 4;
        float mixed[HEADS][4] = {};
        if (i < head_dim) {
#pragma unroll 4
            for (int p = warp; p < length; p += WARPS) {
                float v[4];
                kv_load_up_to_4(values + (u64)p * kv_dim + i, whole, head_dim - i, v);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h < n) {
                        float e = scores[h * SPAN + p];
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            mixed[h][k] = fmaf(e, v[k], mixed[h][k]);
                        }
                    }
                }
            }
        }
        // The queries have been used; their place holds the sums of four warps for four heads.
        float* sums = queries;
#pragma unroll
        for (int h0 = 0; h0 < HEADS; h0 += 4) {
            if (h0 < n) {
#pragma unroll
                for (int h = 0; h < 4; h++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        sums[(warp * 4 + h) * 128 + tid % 32 * 4 + k] = mixed[h0 + h][k];
                    }
                }
                __syncthreads();
                int element = i0 + tid;
                for (int h = 0; h < min(4, n - h0) && element < head_dim; h++) {
                    float sum = sums[h * 128 + tid];
#pragma unroll
                    for (int w = 1; w < WARPS; w++) {
                        sum += sums[(w * 4 + h) * 128 + tid];
                    }
                    out[(u64)(h0 + h) * n_spans * part_len + element] = sum;
                }
                __syncthreads();
            }
        }
    }
}

KERNEL(128, attention_f16)(const float* q, const u64* k_caches, const u64* v_caches, const u32* positions, float* part,
                           int n_head, int n_head_kv, int head_dim, int n_spans, int q_stride, int n_tokens,
                           float scale) {
    attention<u16>(q, k_caches, v_caches, positions, part, n_head, n_head_kv, head_dim, n_spans, q_stride, scale);
}

KERNEL(128, attention_f32)(const float* q, const u64* k_caches, const u64* v_caches, const u32* positions, float* part,
                           int n_head, int n_head_kv, int head_dim, int n_spans, int q_stride, int n_tokens,
                           float scale) {
    attention<float>(q, k_caches, v_caches, positions, part, n_head, n_head_kv, head_dim, n_spans, q_stride, scale);
}

KERNEL(128, attention_merge)(const float* part, const u32* positions, float* y, int n_head, int head_dim, int n_spans,
                             int y_stride, int n_tokens) {
    int head = blockIdx.x, token = blockIdx.y;
    int n = (int)positions[token] / SPAN + 1;
    u64 part_len = (u64)head_dim + 2;
    const float* from = part + ((u64)token * n_head + head) * n_spans * part_len;
    float top = negative_infinity(), sum = 0.0f;
    for (int s = 0; s < n; s++) {
        top = fmaxf(top, from[s * part_len + head_dim]);
    }
    for (int s = 0; s < n; s++) {
        const float* span = from + s * part_len;
        sum = fmaf(span[head_dim + 1], expf(span[head_dim] - top), sum);
    }
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float mixed = 0.0f;
        for (int s = 0; s < n; s++) {
            const float* span = from + s * part_len;
            mixed = fmaf(span[i], expf(span[head_dim] - top), mixed);
        }
        y[(u64)token * y_stride + (u64)head * head_dim + i] = mixed / sum;
    }
}

// ---- the 2-bit gate copy ----

// Columns whose codes share 64 bytes.
#define COPY_GROUP 256
#define COPY_BYTES 64

struct CopyInput {
    float half_step;
    int sum;
};

// Where column i lies in the 8-bit input.
DEVICE int copy_place(int i, int n_embd) {
    int whole = n_embd / COPY_GROUP * COPY_GROUP;
    if (i < whole) {
        return i;
    }
    int stride = (n_embd - whole + 3) / 4, at = i - whole;
    return whole + at / stride * COPY_BYTES + at % stride;
}

DEVICE bool is_outlier(const u32* outliers, int n, int column) {
    for (int o = 0; o < n; o++) {
        if ((int)outliers[o] == column) {
            return true;
        }
    }
    return false;
}

KERNEL(256, gate_copy_quantize)(const float* x, const float* mean, const u32* outliers, i8* q, float* apart,
                                CopyInput* info, int n_embd, int n_outliers, int n_tokens, int x_stride) {
    SHARED(int, total, 1);
    int token = blockIdx.x, tid = threadIdx.x, n_padded = (n_embd + COPY_GROUP - 1) / COPY_GROUP * COPY_GROUP;
    x += (u64)token * x_stride;
    q += (u64)token * n_padded;
    float top = 0.0f, fault = 0.0f;
    for (int i = tid; i < n_embd; i += blockDim.x) {
        if (!is_outlier(outliers, n_outliers, i)) {
            float a = fabsf(x[i] - mean[i]);
            top = a > top ? a : top;
            fault += a * 0.0f;
        }
    }
    for (int i = n_embd / COPY_GROUP * COPY_GROUP + tid; i < n_padded; i += blockDim.x) {
        q[i] = 0;
    }
    if (tid == 0) {
        total[0] = 0;
    }
    top = block_max(top);
    fault = block_sum(fault);
    // Where the division overflows, the input counts as zero.
    float inverse = 127.0f / top;
    inverse = inverse < bits_float(0x7f800000u) ? inverse : 0.0f;
    int sum = 0;
    for (int i = tid; i < n_embd; i += blockDim.x) {
        if (!is_outlier(outliers, n_outliers, i)) {
            // 1.5 * 2^23: the sum has no bits for a fraction, and the integer in its lowest ones.
            i8 rounded = (i8)float_bits((x[i] - mean[i]) * inverse + 12582912.0f);
            q[copy_place(i, n_embd)] = rounded;
            sum += rounded;
        } else {
            q[copy_place(i, n_embd)] = 0;
        }
    }
    atomicAdd(&total[0], sum);
    for (int o = tid; o < n_outliers; o += blockDim.x) {
        apart[(u64)token * n_outliers + o] = x[outliers[o]] - mean[outliers[o]];
    }
    __syncthreads();
    if (tid == 0) {
        info[token].half_step = top / 127.0f * 0.5f + fault;
        info[token].sum = total[0];
    }
}

// Products of the four 2-bit codes in each byte of `codes` with the four inputs they belong to.
DEVICE int copy_dot4(u32 codes, const i8* q, int b, int sum) {
    for (int k = 0; k < 4; k++) {
        int four = *(const int*)(q + k * COPY_BYTES + b);
        sum = dot4((int)(codes >> (2 * k) & 0x03030303u), four, sum);
    }
    return sum;
}

// A warp takes 16 neurons; 4 warps a block make one word of bits.
KERNEL(128, gate_copy_bits)(const u8* codes, const float* scales, const float* thresholds, const u16* outlier_weights,
                            const i8* q, const float* apart, const CopyInput* info, const u32* positions, u64* bits,
                            int n_ff, int n_embd, int n_outliers, int n_tokens) {
    SHARED(u32, word, 4);
    int token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int n_groups = (n_embd + COPY_GROUP - 1) / COPY_GROUP, n_words = (n_ff + 63) / 64;
    u64 row_bytes = (u64)(n_embd / COPY_GROUP) * COPY_BYTES + (n_embd % COPY_GROUP + 3) / 4;
    q += (u64)token * n_groups * COPY_GROUP;
    apart += (u64)token * n_outliers;
    CopyInput input = info[token];
    bool all = positions && positions[token] == 0;
    u32 found = 0;
    for (int i = 0; i < 16; i++) {
        int neuron = blockIdx.x * 64 + warp * 16 + i;
        if (neuron >= n_ff) {
            break;
        }
        if (all) {
            found |= 1u << i;
            continue;
        }
        const u8* row = codes + neuron * row_bytes;
        int dot = 0;
        for (int c = lane; c < n_groups * (COPY_BYTES / 4); c += 32) {
            // Rows start at any byte.
            const u8* p = row + 4 * c;
            u32 four = (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
            int group = c / (COPY_BYTES / 4), b = c % (COPY_BYTES / 4) * 4;
            dot = copy_dot4(four, q + group * COPY_GROUP, b, dot);
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(FULL_WARP, dot, offset);
        }
        float score = (float)(2 * dot - 3 * input.sum) * (scales[neuron] * input.half_step);
        for (int o = 0; o < n_outliers; o++) {
            score = fmaf(half_to_float(outlier_weights[(u64)neuron * n_outliers + o]), apart[o], score);
        }
        // Written so that NaN counts as active.
        found |= (score < thresholds[neuron] ? 0u : 1u) << i;
    }
    if (lane == 0) {
        word[warp] = found;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        bits[(u64)token * n_words + blockIdx.x] =
            (u64)word[0] | (u64)word[1] << 16 | (u64)word[2] << 32 | (u64)word[3] << 48;
    }
}

// ---- active and owned: rows to compute, ascending; a block a token ----

KERNEL(1024, compact)(const u64* bits, const u32* owned, u32* list, u32* counts, u64* counters, int n_owned, int n_ff,
                      int list_stride, int n_tokens) {
    SHARED(u32, in_warp, 32);
    int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    list += (u64)token * list_stride;
    const u64* row_bits = bits ? bits + (u64)token * ((n_ff + 63) / 64) : 0;
    u32 found = 0;
    for (int r0 = 0; r0 < n_owned; r0 += blockDim.x) {
        int r = r0 + threadIdx.x;
        bool active = r < n_owned && (!row_bits || bit_is_set(row_bits, owned[r]));
        u32 ballot = __ballot_sync(FULL_WARP, active);
        if (lane == 0) {
            in_warp[warp] = __popc(ballot);
        }
        __syncthreads();
        u32 before = found;
        for (int w = 0; w < n_warps; w++) {
            before += w < warp ? in_warp[w] : 0;
            found += in_warp[w];
        }
        if (active) {
            list[before + __popc(ballot & ((1u << lane) - 1))] = r;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        counts[token] = found;
        count(counters, ACTIVE, found);
    }
}

KERNEL(128, count_marks)(u32* marks, u64* counters, int n_owned) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    u32 bits = r < n_owned ? marks[r] : 0;
    for (int i = 0; i < 3; i++) {
        u32 ballot = __ballot_sync(FULL_WARP, bits >> i & 1);
        if (threadIdx.x % 32 == 0) {
            count(counters, DISTINCT_GATE + i, __popc(ballot));
        }
    }
    if (r < n_owned) {
        marks[r] = 0;
    }
}

// For each neuron, for how many tokens its hidden value is not zero; hidden values by list, or without one by row.
KERNEL(128, count_fired)(const float* hidden, const u32* list, const u32* counts, const u32* owned, u64* fired,
                         int n_owned, int n_tokens) {
    int k = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    u64 at = (u64)token * n_owned + k;
    if (k < (list ? (int)counts[token] : n_owned) && hidden[at] != 0.0f) {
        atomicAdd(&fired[owned[list ? list[at] : (u32)k]], (u64)1);
    }
}

// ---- sums over chunks of down rows ----

KERNEL(128, down_reduce)(const float* part, const u32* counts, float* y, int n_embd, int chunk_rows, int n_chunks,
                         int accumulate, int n_tokens) {
    int token = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_embd) {
        return;
    }
    int n = counts ? ((int)counts[token] + chunk_rows - 1) / chunk_rows : n_chunks;
    const float* from = part + (u64)token * n_chunks * n_embd + i;
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < n; c++) {
        sum += from[(u64)c * n_embd];
    }
    float* to = y + (u64)token * n_embd + i;
    *to = accumulate ? *to + sum : sum;
}

// ---- small things ----

KERNEL(128, add_rows)(float* y, const float* x, const float* bias, int n, int n_rows, int y_stride, int x_stride) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (i >= n) {
        return;
    }
    float v = y[(u64)row * y_stride + i];
    v += x ? x[(u64)row * x_stride + i] : 0.0f;
    y[(u64)row * y_stride + i] = bias ? v + bias[i] : v;
}

KERNEL(128, fill_u32)(u32* p, int value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        p[i] = (u32)value;
    }
}

// The larger value; of equal ones the lower index.
DEVICE void take_better(float& value, u32& index, float other, u32 other_index) {
    if (other > value || (other == value && other_index < index)) {
        value = other;
        index = other_index;
    }
}

DEVICE void warp_best(float& value, u32& index) {
    for (int offset = 16; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, value, offset);
        u32 other_index = __shfl_xor_sync(FULL_WARP, index, offset);
        take_better(value, index, other, other_index);
    }
}

KERNEL(256, argmax_part)(const float* logits, float* values, u32* indices, int n, int n_parts, int stride,
                         int n_rows) {
    SHARED(float, best, 32);
    SHARED(u32, places, 32);
    int part = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int part_len = (n + n_parts - 1) / n_parts, end = min(n, (part + 1) * part_len);
    const float* from = logits + (u64)row * stride;
    float value = negative_infinity();
    // NaN is larger than nothing and so never taken.
    u32 index = 0xffffffffu;
    for (int i = part * part_len + threadIdx.x; i < end; i += blockDim.x) {
        take_better(value, index, from[i], i);
    }
    warp_best(value, index);
    if (lane == 0) {
        best[warp] = value;
        places[warp] = index;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x / 32; w++) {
            take_better(value, index, best[w], places[w]);
        }
        values[(u64)row * n_parts + part] = value;
        indices[(u64)row * n_parts + part] = index;
    }
}

KERNEL(32, argmax_merge)(const float* values, const u32* indices, u32* out, int n_parts, int n_rows) {
    int row = blockIdx.x;
    float value = negative_infinity();
    u32 index = 0xffffffffu;
    for (int i = threadIdx.x; i < n_parts; i += 32) {
        take_better(value, index, values[(u64)row * n_parts + i], indices[(u64)row * n_parts + i]);
    }
    warp_best(value, index);
    if (threadIdx.x == 0) {
        out[row] = index == 0xffffffffu ? 0 : index;
    }
}

#ifdef EMULATED
EMULATED_MODULE(base) {
    EMULATED_KERNEL(rms_norm);
    EMULATED_KERNEL(layer_norm);
    EMULATED_KERNEL(rope);
    EMULATED_KERNEL(kv_append_f16);
    EMULATED_KERNEL(kv_append_f32);
    EMULATED_KERNEL(attention_f16);
    EMULATED_KERNEL(attention_f32);
    EMULATED_KERNEL(attention_merge);
    EMULATED_KERNEL(gate_copy_quantize);
    EMULATED_KERNEL(gate_copy_bits);
    EMULATED_KERNEL(compact);
    EMULATED_KERNEL(count_marks);
    EMULATED_KERNEL(count_fired);
    EMULATED_KERNEL(down_reduce);
    EMULATED_KERNEL(add_rows);
    EMULATED_KERNEL(fill_u32);
    EMULATED_KERNEL(argmax_part);
    EMULATED_KERNEL(argmax_merge);
}
#endif
