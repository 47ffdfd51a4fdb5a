// Kernels that read a weight matrix, compiled once for each type: `WEIGHT` is its name, `f16` or `q4_0` say.
// README.md beside this file has the argument lists and launch rules.
#include "products.cuh"

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define TYPED(name) CONCAT(name##_, WEIGHT)

typedef CONCAT(Weights_, WEIGHT) Weights;

// Whether the chunks of a matrix with rows of n weights can be read whole. Blocks can, plain types where rows are
// aligned.
DEVICE bool has_whole_chunks(const u8* w, int n) {
    return Weights::BLOCKS || (n % 8 == 0 && is_aligned(w));
}

// The same for chunks of a matrix and vectors that they meet. Block types ask for aligned vectors.
DEVICE bool has_whole_chunks(const u8* w, const float* x, int n, int x_stride) {
    return Weights::BLOCKS || (has_whole_chunks(w, n) && x_stride % 4 == 0 && is_aligned(x));
}

// Products of R rows with T vectors of length n. Lane i % 32 takes chunk i, lanes are added as a tree: the order of a
// sum depends on n alone. Lane l gets the product of row and vector `pair_of<R * T>() = row * T + vector`.
template <int R, int T>
DEVICE float dot(const u8* const (&rows)[R], const float* const (&x)[T], int n, bool whole) {
    int lane = threadIdx.x % 32, n_chunks = n / 8;
    float sums[R * T];
#pragma unroll
    for (int p = 0; p < R * T; p++) {
        sums[p] = 0.0f;
    }
#pragma unroll(T == 1 ? Weights::AHEAD : 1)
    for (int i = lane; whole && i < n_chunks; i += 32) {
        float w[R][8];
        Columns columns = Weights::columns(i);
#pragma unroll
        for (int r = 0; r < R; r++) {
            Weights::chunk(rows[r], i, w[r]);
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            Quad a = load_quad(x[t] + columns.first), b = load_quad(x[t] + columns.second);
#pragma unroll
            for (int r = 0; r < R; r++) {
                float& sum = sums[r * T + t];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum = fmaf(w[r][j], a.v[j], sum);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum = fmaf(w[r][4 + j], b.v[j], sum);
                }
            }
        }
    }
    // The same in single weights, the last chunk cut off where the row ends.
    for (int i = 8 * lane; !Weights::BLOCKS && !whole && i < n; i += 8 * 32) {
#pragma unroll 1
        for (int j = i; j < min(i + 8, n); j++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                float w = Weights::one(rows[r], j);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    sums[r * T + t] = fmaf(w, x[t][j], sums[r * T + t]);
                }
            }
        }
    }
    return warp_sums<R * T>(sums);
}

// The vectors of a tile; past the last token the last one is repeated.
template <int T>
DEVICE void tile_vectors(const float* x, int first, int n_tokens, int stride, const float* (&out)[T]) {
#pragma unroll
    for (int t = 0; t < T; t++) {
        out[t] = x + (u64)min(first + t, n_tokens - 1) * stride;
    }
}

// Chunk i of a row of n weights, with zeros past its end.
DEVICE void chunk_or_rest(const u8* row, int i, int n, bool whole, float* w) {
    if (whole) {
        Weights::chunk(row, i, w);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            w[j] = 8 * i + j < n ? Weights::one(row, 8 * i + j) : 0.0f;
        }
    }
}

// ---- embedding ----

KERNEL(128, TYPED(embed))(const u8* table, const u32* ids, float* y, int n_embd, int n_tokens, int row_offset,
                          int accumulate) {
    int token = blockIdx.x;
    const u8* row = table + ((u64)ids[token] + row_offset) * Weights::row_bytes(n_embd);
    float* to = y + (u64)token * n_embd;
    bool whole = has_whole_chunks(table, n_embd);
    for (int i = threadIdx.x; i < (n_embd + 7) / 8; i += blockDim.x) {
        float w[8];
        Columns columns = Weights::columns(i);
        chunk_or_rest(row, i, n_embd, whole, w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int at = (j < 4 ? columns.first : columns.second) + j % 4;
            if (at < n_embd) {
                to[at] = accumulate ? to[at] + w[j] : w[j];
            }
        }
    }
}

// ---- y = W x ----

template <int T>
DEVICE void matvec(const u8* w, const float* x, const float* bias, float* y, int n_out, int n_in, int n_tokens,
                   int x_stride, int y_stride, int flags) {
    int first = first_row(), token = blockIdx.y * TILE;
    if (first >= n_out) {
        return;
    }
    const u8* rows[ROWS];
    const float* vectors[T];
    two_rows(w, Weights::row_bytes(n_in), first, n_out, rows);
    tile_vectors<T>(x, token, n_tokens, x_stride, vectors);
    float sum = dot<ROWS, T>(rows, vectors, n_in, has_whole_chunks(w, x, n_in, x_stride));
    int o = first + pair_of<ROWS * T>() / T, t = token + pair_of<ROWS * T>() % T;
    if (is_first_of_pair<ROWS * T>() && o < n_out && t < n_tokens) {
        store(y + (u64)t * y_stride + o, sum, bias ? bias[o] : 0.0f, flags);
    }
}

KERNEL(128, TYPED(matvec))(const u8* w, const float* x, const float* bias, float* y, int n_out, int n_in, int n_tokens,
                           int x_stride, int y_stride, int flags) {
    if (n_tokens - (int)blockIdx.y * TILE <= TILE / 2) {
        matvec<TILE / 2>(w, x, bias, y, n_out, n_in, n_tokens, x_stride, y_stride, flags);
    } else {
        matvec<TILE>(w, x, bias, y, n_out, n_in, n_tokens, x_stride, y_stride, flags);
    }
}

// For one token: fewer registers, so that more warps wait for memory at a time.
KERNEL(128, TYPED(matvec_one))(const u8* w, const float* x, const float* bias, float* y, int n_out, int n_in,
                               int n_tokens, int x_stride, int y_stride, int flags) {
    matvec<1>(w, x, bias, y, n_out, n_in, n_tokens, x_stride, y_stride, flags);
}

// ---- y = W x for many tokens: 64 rows by 64 tokens a block, 32 weights of each row at a time ----

#define SIDE 64
#define STEP_CHUNKS 4
#define STEP (8 * STEP_CHUNKS)
// Longer than a row by 4, so that columns of the tile fall into different banks.
#define PITCH (SIDE + 4)

// Chunk i of a row of n weights for a tile; zeros past its end.
DEVICE void fetch_weights(const u8* row, int i, int n, bool whole, float* w) {
    if (i < (n + 7) / 8) {
        chunk_or_rest(row, i, n, whole, w);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            w[j] = 0.0f;
        }
    }
}

// The numbers of a vector that chunk i of a row of n weights meets.
DEVICE void fetch_vector(const float* x, int i, int n, bool whole, float* v) {
    Columns columns = Weights::columns(i);
    Quad a = {}, b = {};
    if (whole && i < n / 8) {
        a = load_quad(x + columns.first);
        b = load_quad(x + columns.second);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = j < 4 ? a.v[j % 4] : b.v[j % 4];
        if (!Weights::BLOCKS && !whole && 8 * i + j < n) {
            v[j] = x[8 * i + j];
        }
    }
}

// Puts a chunk into a tile `[weight of the step][row or token]`.
DEVICE void put_chunk(float* tile, int chunk, int place, const float* v) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        tile[(8 * chunk + j) * PITCH + place] = v[j];
    }
}

// Adds the products of a step to those of 4 rows and 4 tokens.
DEVICE void multiply(const float* tile_w, const float* tile_x, int my_row, int my_token, float (&sums)[4][4]) {
#pragma unroll 4
    for (int k = 0; k < STEP; k++) {
        Quad wk = load_quad(tile_w + k * PITCH + my_row);
        Quad xk = load_quad(tile_x + k * PITCH + my_token);
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int t = 0; t < 4; t++) {
                sums[r][t] = fmaf(wk.v[r], xk.v[t], sums[r][t]);
            }
        }
    }
}

KERNEL(256, TYPED(matmul))(const u8* w, const float* x, const float* bias, float* y, int n_out, int n_in, int n_tokens,
                           int x_stride, int y_stride, int flags) {
    SHARED(Quad, tile_w4, STEP* PITCH / 4);
    SHARED(Quad, tile_x4, STEP* PITCH / 4);
    float *tile_w = (float*)tile_w4, *tile_x = (float*)tile_x4;
    int row0 = blockIdx.x * SIDE, token0 = blockIdx.y * SIDE, tid = threadIdx.x;
    int n_chunks = (n_in + 7) / 8, my_row = tid % 16 * 4, my_token = tid / 16 * 4;
    bool whole = has_whole_chunks(w, x, n_in, x_stride);
    float sums[4][4] = {};
    // Each thread brings one chunk of a row and one of a vector: 4 chunks of 64 rows are 256.
    int lane_row = tid % SIDE, lane_chunk = tid / SIDE;
    const u8* row = w + (u64)min(row0 + lane_row, n_out - 1) * Weights::row_bytes(n_in);
    const float* vector = x + (u64)min(token0 + lane_row, n_tokens - 1) * x_stride;
    for (int i0 = 0; i0 < n_chunks; i0 += STEP_CHUNKS) {
        float ws[8], xs[8];
        fetch_weights(row, i0 + lane_chunk, n_in, whole, ws);
        fetch_vector(vector, i0 + lane_chunk, n_in, whole, xs);
        __syncthreads();
        put_chunk(tile_w, lane_chunk, lane_row, ws);
        put_chunk(tile_x, lane_chunk, lane_row, xs);
        __syncthreads();
        multiply(tile_w, tile_x, my_row, my_token, sums);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int o = row0 + my_row + r, token = token0 + my_token + t;
            if (o < n_out && token < n_tokens) {
                store(y + (u64)token * y_stride + o, sums[r][t], bias ? bias[o] : 0.0f, flags);
            }
        }
    }
}

// ---- low-rank predictor: 64 neurons a block ----

KERNEL(128, TYPED(predict))(const u8* fc2, const float* inner, u64* bits, int n_ff, int rank, int n_tokens,
                            int inner_stride, float threshold) {
    SHARED(u32, found, WARPS* TILE);
    int warp = threadIdx.x / 32, pair = pair_of<PAIRS>(), token = blockIdx.y * TILE;
    bool whole = has_whole_chunks(fc2, inner, rank, inner_stride);
    const float* vectors[TILE];
    tile_vectors<TILE>(inner, token, n_tokens, inner_stride, vectors);
    // The 16 neurons of this warp for the token of this lane.
    u32 active = 0;
    for (int i = 0; i < 16; i += ROWS) {
        int neuron = blockIdx.x * 64 + warp * 16 + i;
        if (neuron >= n_ff) {
            break;
        }
        const u8* rows[ROWS];
        two_rows(fc2, Weights::row_bytes(rank), neuron, n_ff, rows);
        float score = dot<ROWS, TILE>(rows, vectors, rank, whole);
        // Written so that NaN counts as active.
        bool inactive = score < threshold || neuron + pair / TILE >= n_ff;
        active |= (inactive ? 0u : 1u) << (i + pair / TILE);
    }
    active |= __shfl_xor_sync(FULL_WARP, active, 16);
    if (threadIdx.x % 32 < 16 && is_first_of_pair<PAIRS>()) {
        found[warp * TILE + pair] = active;
    }
    __syncthreads();
    if (threadIdx.x < TILE && token + threadIdx.x < n_tokens) {
        u64 word = 0;
        for (int k = 0; k < WARPS; k++) {
            word |= (u64)found[k * TILE + threadIdx.x] << (16 * k);
        }
        bits[(u64)(token + threadIdx.x) * ((n_ff + 63) / 64) + blockIdx.x] = word;
    }
}

// ---- neurons of one token, by its list ----

// The rows of this warp in the list of its token; -1 where the list has ended.
DEVICE int listed_rows(const u32* list, const u32* counts, int list_stride, int (&ids)[ROWS]) {
    int token = blockIdx.y, first = first_row(), n = (int)counts[token] - first;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        ids[r] = r < n ? (int)list[(u64)token * list_stride + first + r] : -1;
    }
    return min(n, ROWS);
}

DEVICE void products(const u8* w, const int (&ids)[ROWS], const float* x, int n_embd, int x_stride, float (&out)[ROWS]) {
    const u8* rows[ROWS];
    const float* vectors[1] = {x + (u64)blockIdx.y * x_stride};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        rows[r] = w + (u64)(ids[r] < 0 ? ids[0] < 0 ? ids[1] : ids[0] : ids[r]) * Weights::row_bytes(n_embd);
    }
    float mine = dot<ROWS, 1>(rows, vectors, n_embd, has_whole_chunks(w, x, n_embd, x_stride));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        out[r] = __shfl_sync(FULL_WARP, mine, r * (32 / ROWS));
    }
}

KERNEL(128, TYPED(ffn_gate_list))(const u8* gate, const float* x, const u32* list, const u32* counts,
                                  float* gate_values, u32* marks, u64* counters, int n_embd, int list_stride,
                                  int x_stride, int activation, int n_tokens) {
    int ids[ROWS];
    int n = listed_rows(list, counts, list_stride, ids);
    if (n <= 0) {
        return;
    }
    float g[ROWS];
    products(gate, ids, x, n_embd, x_stride, g);
    if (threadIdx.x % 32 == 0) {
        for (int r = 0; r < n; r++) {
            gate_values[(u64)blockIdx.y * list_stride + first_row() + r] = activate(activation, g[r]);
            mark(marks, ids[r], MARK_GATE);
        }
        count(counters, GATE_ROWS, n);
    }
}

KERNEL(128, TYPED(ffn_list))(const u8* gate, const u8* up, const float* up_bias, const float* x,
                             const float* gate_values, const u32* list, const u32* counts, float* hidden, u32* marks,
                             u64* counters, int n_embd, int list_stride, int x_stride, int activation, int gating,
                             int skip_zeros, int n_tokens) {
    int ids[ROWS];
    int n = listed_rows(list, counts, list_stride, ids);
    if (n <= 0) {
        return;
    }
    u64 at = (u64)blockIdx.y * list_stride + first_row();
    // Gate first: where it is zero, the up row is not needed.
    float g[ROWS], u[ROWS];
    if (gating == GATING_NONE) {
        g[0] = g[1] = 1.0f;
    } else if (gate) {
        products(gate, ids, x, n_embd, x_stride, g);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            g[r] = activate(activation, g[r]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            g[r] = r < n ? gate_values[at + r] : 0.0f;
        }
        // `hidden` may be the same buffer.
        __syncwarp();
    }
    int wanted[ROWS], n_up = 0, n_fired = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        wanted[r] = r < n && !(skip_zeros && gating != GATING_NONE && g[r] == 0.0f) ? ids[r] : -1;
        n_up += wanted[r] >= 0;
        u[r] = 0.0f;
    }
    if (n_up > 0) {
        products(up, wanted, x, n_embd, x_stride, u);
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < n) {
                float h = 0.0f;
                if (wanted[r] >= 0) {
                    float v = u[r] + (up_bias ? up_bias[ids[r]] : 0.0f);
                    h = gating == GATING_GATE ? g[r] * v : g[r] * activate(activation, v);
                }
                n_fired += h != 0.0f;
                hidden[at + r] = h;
                mark(marks, ids[r], (gate && gating != GATING_NONE ? MARK_GATE : 0) | (wanted[r] >= 0 ? MARK_UP : 0));
            }
        }
        count(counters, GATE_ROWS, gate && gating != GATING_NONE ? n : 0);
        count(counters, UP_ROWS, n_up);
        count(counters, FIRED, n_fired);
    }
}

// ---- neurons of 8 tokens ----

// What a lane of the kernels below looks after: one row and one token, as `dot` hands them out. Two lanes have the
// same pair; the first of them writes.
struct Pair {
    int row, token;
    bool exists, is_first;
};

DEVICE Pair my_pair(int n_owned, int n_tokens) {
    Pair p;
    p.row = first_row() + pair_of<PAIRS>() / TILE;
    p.token = blockIdx.y * TILE + pair_of<PAIRS>() % TILE;
    p.exists = p.row < n_owned && p.token < n_tokens;
    p.is_first = p.exists && is_first_of_pair<PAIRS>();
    return p;
}

DEVICE bool is_active(Pair p, const u64* bits, const u32* owned, int n_ff) {
    return p.exists && (!bits || bit_is_set(bits + (u64)p.token * ((n_ff + 63) / 64), owned[p.row]));
}

DEVICE float tile_product(const u8* w, const float* x, int n_embd, int n_owned, int x_stride, int n_tokens) {
    const u8* rows[ROWS];
    const float* vectors[TILE];
    two_rows(w, Weights::row_bytes(n_embd), first_row(), n_owned, rows);
    tile_vectors<TILE>(x, blockIdx.y * TILE, n_tokens, x_stride, vectors);
    return dot<ROWS, TILE>(rows, vectors, n_embd, has_whole_chunks(w, x, n_embd, x_stride));
}

// Marks the rows that any token of the tile reads, and counts the pairs; `lanes` has two bits a pair.
DEVICE void note_rows(u32 lanes, u32* marks, u64* counters, u32 bit, int place) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (lanes >> (32 / ROWS * r) & ((1u << (32 / ROWS)) - 1)) {
                mark(marks, first_row() + r, bit);
            }
        }
        count(counters, place, __popc(lanes) / (32 / PAIRS));
    }
}

KERNEL(128, TYPED(ffn_gate_tile))(const u8* gate, const float* x, const u64* bits, const u32* owned,
                                  float* gate_values, u32* marks, u64* counters, int n_embd, int n_owned, int n_ff,
                                  int x_stride, int activation, int n_tokens) {
    Pair p = my_pair(n_owned, n_tokens);
    bool active = is_active(p, bits, owned, n_ff);
    u32 lanes = __ballot_sync(FULL_WARP, active);
    float g = 0.0f;
    if (lanes) {
        g = activate(activation, tile_product(gate, x, n_embd, n_owned, x_stride, n_tokens));
        note_rows(lanes, marks, counters, MARK_GATE, GATE_ROWS);
    }
    if (p.is_first) {
        gate_values[(u64)p.token * n_owned + p.row] = active ? g : 0.0f;
    }
}

KERNEL(128, TYPED(ffn_tile))(const u8* gate, const u8* up, const float* up_bias, const float* x,
                             const float* gate_values, const u64* bits, const u32* owned, float* hidden, u32* marks,
                             u64* counters, int n_embd, int n_owned, int n_ff, int x_stride, int activation, int gating,
                             int skip_zeros, int n_tokens) {
    Pair p = my_pair(n_owned, n_tokens);
    bool active = is_active(p, bits, owned, n_ff);
    u32 lanes = __ballot_sync(FULL_WARP, active);
    float g = 1.0f, h = 0.0f;
    if (gating != GATING_NONE && lanes) {
        if (gate) {
            g = activate(activation, tile_product(gate, x, n_embd, n_owned, x_stride, n_tokens));
            note_rows(lanes, marks, counters, MARK_GATE, GATE_ROWS);
        } else {
            g = p.exists ? gate_values[(u64)p.token * n_owned + p.row] : 0.0f;
        }
    }
    bool wanted = active && !(skip_zeros && gating != GATING_NONE && g == 0.0f);
    lanes = __ballot_sync(FULL_WARP, wanted);
    if (lanes) {
        float u = tile_product(up, x, n_embd, n_owned, x_stride, n_tokens);
        note_rows(lanes, marks, counters, MARK_UP, UP_ROWS);
        if (wanted) {
            u += up_bias ? up_bias[p.row] : 0.0f;
            h = gating == GATING_GATE ? g * u : g * activate(activation, u);
        }
    }
    u32 fired = __ballot_sync(FULL_WARP, h != 0.0f && p.is_first);
    if (threadIdx.x % 32 == 0) {
        count(counters, FIRED, __popc(fired));
    }
    if (p.is_first) {
        hidden[(u64)p.token * n_owned + p.row] = h;
    }
}

// ---- y = sum of down rows: a thread 8 columns, a block 1024, rows in order ----

// Rows that are looked at together for those that count.
#define LOOK 128

// Puts the threads' `keep` numbers together in their order; returns their count and this thread's place. Between two calls
// there is a barrier, and its own comes after all that was read before.
DEVICE int pack(bool keep, int& place) {
    SHARED(u32, in_warp, LOOK / 32);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = 0;
    u32 ballot = __ballot_sync(FULL_WARP, keep);
    if (lane == 0) {
        in_warp[warp] = __popc(ballot);
    }
    __syncthreads();
    place = __popc(ballot & ((1u << lane) - 1));
    for (int k = 0; k < LOOK / 32; k++) {
        place += k < warp ? in_warp[k] : 0;
        n += in_warp[k];
    }
    return n;
}

DEVICE void store_columns(float* to, int i, int n_embd, const float* sums) {
    Columns columns = Weights::columns(i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int at = (j < 4 ? columns.first : columns.second) + j % 4;
        if (at < n_embd) {
            to[at] = sums[j];
        }
    }
}

KERNEL(128, TYPED(down_list))(const u8* down, const float* hidden, const u32* list, const u32* counts, float* part,
                              u32* marks, u64* counters, int n_embd, int list_stride, int chunk_rows, int n_chunks,
                              int skip_zeros, int n_tokens) {
    SHARED(float, factors, LOOK);
    SHARED(u32, rows, LOOK);
    int token = blockIdx.z, first = blockIdx.y * chunk_rows, end = min((int)counts[token], first + chunk_rows);
    if (first >= end) {
        return;
    }
    int i = blockIdx.x * blockDim.x + threadIdx.x, n_read = 0;
    bool whole = has_whole_chunks(down, n_embd), mine = i < (n_embd + 7) / 8;
    hidden += (u64)token * list_stride;
    list += (u64)token * list_stride;
    u64 row_bytes = Weights::row_bytes(n_embd);
    float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int k0 = first; k0 < end; k0 += LOOK) {
        int k = k0 + threadIdx.x, place;
        float h = k < end ? hidden[k] : 0.0f;
        bool keep = k < end && !(skip_zeros && h == 0.0f);
        int n = pack(keep, place);
        if (keep) {
            factors[place] = h;
            rows[place] = list[k];
            if (blockIdx.x == 0) {
                mark(marks, list[k], MARK_DOWN);
            }
        }
        __syncthreads();
        n_read += n;
        if (mine) {
#pragma unroll 4
            for (int p = 0; p < n; p++) {
                float w[8];
                chunk_or_rest(down + rows[p] * row_bytes, i, n_embd, whole, w);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sums[j] = fmaf(factors[p], w[j], sums[j]);
                }
            }
        }
    }
    if (mine) {
        store_columns(part + ((u64)token * n_chunks + blockIdx.y) * n_embd, i, n_embd, sums);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        count(counters, DOWN_ROWS, n_read);
    }
}

KERNEL(128, TYPED(down_tile))(const u8* down, const float* hidden, const u64* bits, const u32* owned, float* part,
                              u32* marks, u64* counters, int n_embd, int n_owned, int n_ff, int chunk_rows,
                              int n_chunks, int skip_zeros, int n_tokens) {
    SHARED(float, factors, LOOK* TILE);
    SHARED(u32, rows, LOOK);
    SHARED(int, n_read, 1);
    int token0 = blockIdx.z * TILE, first = blockIdx.y * chunk_rows, end = min(n_owned, first + chunk_rows);
    int i = blockIdx.x * blockDim.x + threadIdx.x, tid = threadIdx.x;
    bool whole = has_whole_chunks(down, n_embd), mine = i < (n_embd + 7) / 8;
    u64 row_bytes = Weights::row_bytes(n_embd);
    float sums[TILE][8] = {};
    if (tid == 0) {
        n_read[0] = 0;
    }
    for (int k0 = first; k0 < end; k0 += LOOK) {
        int k = k0 + tid, place, n_pairs = 0;
        float h[TILE];
#pragma unroll
        for (int t = 0; t < TILE; t++) {
            bool here = k < end && token0 + t < n_tokens;
            h[t] = here ? hidden[(u64)(token0 + t) * n_owned + k] : 0.0f;
            bool active = here && (!bits || bit_is_set(bits + (u64)(token0 + t) * ((n_ff + 63) / 64), owned[k]));
            n_pairs += active && !(skip_zeros && h[t] == 0.0f);
        }
        int n = pack(n_pairs > 0, place);
        if (n_pairs > 0) {
            rows[place] = k;
#pragma unroll
            for (int t = 0; t < TILE; t++) {
                factors[place * TILE + t] = h[t];
            }
            if (blockIdx.x == 0) {
                mark(marks, k, MARK_DOWN);
                atomicAdd(&n_read[0], n_pairs);
            }
        }
        __syncthreads();
        if (mine) {
            for (int p = 0; p < n; p++) {
                float w[8];
                chunk_or_rest(down + rows[p] * row_bytes, i, n_embd, whole, w);
#pragma unroll
                for (int t = 0; t < TILE; t++) {
                    float f = factors[p * TILE + t];
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        sums[t][j] = fmaf(f, w[j], sums[t][j]);
                    }
                }
            }
        }
    }
    if (mine) {
#pragma unroll
        for (int t = 0; t < TILE; t++) {
            if (token0 + t < n_tokens) {
                store_columns(part + ((u64)(token0 + t) * n_chunks + blockIdx.y) * n_embd, i, n_embd, sums[t]);
            }
        }
    }
    __syncthreads();
    if (blockIdx.x == 0 && tid == 0) {
        count(counters, DOWN_ROWS, n_read[0]);
    }
}

// ---- neurons of many tokens: 64 rows by 64 tokens a block ----

// What a block counts, in shared memory, before it adds it to the counters.
enum { PAIRS_GATE = 0, PAIRS_UP = 1, PAIRS_FIRED = 2 };

KERNEL(256, TYPED(ffn_matmul))(const u8* gate, const u8* up, const float* up_bias, const float* x,
                               const float* gate_values, const u64* bits, const u32* owned, float* hidden, u32* marks,
                               u64* counters, int n_embd, int n_owned, int n_ff, int x_stride, int activation,
                               int gating, int skip_zeros, int n_tokens) {
    SHARED(Quad, tile_g4, STEP* PITCH / 4);
    SHARED(Quad, tile_u4, STEP* PITCH / 4);
    SHARED(Quad, tile_x4, STEP* PITCH / 4);
    SHARED(u32, read_rows, SIDE);
    SHARED(int, n_pairs, 3);
    float *tile_g = (float*)tile_g4, *tile_u = (float*)tile_u4, *tile_x = (float*)tile_x4;
    int row0 = blockIdx.x * SIDE, token0 = blockIdx.y * SIDE, tid = threadIdx.x;
    int n_chunks = (n_embd + 7) / 8, my_row = tid % 16 * 4, my_token = tid / 16 * 4;
    bool is_gated = gating != GATING_NONE, is_fused = is_gated && gate;
    bool whole = has_whole_chunks(up, x, n_embd, x_stride) && (!is_fused || has_whole_chunks(gate, n_embd));
    float g_sums[4][4] = {}, u_sums[4][4] = {};
    int lane_row = tid % SIDE, lane_chunk = tid / SIDE;
    u64 row_at = (u64)min(row0 + lane_row, n_owned - 1) * Weights::row_bytes(n_embd);
    const float* vector = x + (u64)min(token0 + lane_row, n_tokens - 1) * x_stride;
    for (int i0 = 0; i0 < n_chunks; i0 += STEP_CHUNKS) {
        float gs[8], us[8], xs[8];
        if (is_fused) {
            fetch_weights(gate + row_at, i0 + lane_chunk, n_embd, whole, gs);
        }
        fetch_weights(up + row_at, i0 + lane_chunk, n_embd, whole, us);
        fetch_vector(vector, i0 + lane_chunk, n_embd, whole, xs);
        __syncthreads();
        if (is_fused) {
            put_chunk(tile_g, lane_chunk, lane_row, gs);
        }
        put_chunk(tile_u, lane_chunk, lane_row, us);
        put_chunk(tile_x, lane_chunk, lane_row, xs);
        __syncthreads();
        if (is_fused) {
            multiply(tile_g, tile_x, my_row, my_token, g_sums);
        }
        multiply(tile_u, tile_x, my_row, my_token, u_sums);
    }
    if (tid < SIDE) {
        read_rows[tid] = 0;
    }
    if (tid < 3) {
        n_pairs[tid] = 0;
    }
    __syncthreads();
    int n_gate = 0, n_up = 0, n_fired = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = row0 + my_row + r;
        u32 read = 0;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int token = token0 + my_token + t;
            if (row >= n_owned || token >= n_tokens) {
                continue;
            }
            u64 at = (u64)token * n_owned + row;
            bool active = !bits || bit_is_set(bits + (u64)token * ((n_ff + 63) / 64), owned[row]);
            float g = !is_gated ? 1.0f : is_fused ? activate(activation, g_sums[r][t]) : gate_values[at], h = 0.0f;
            bool wanted = active && !(skip_zeros && is_gated && g == 0.0f);
            if (wanted) {
                float u = u_sums[r][t] + (up_bias ? up_bias[row] : 0.0f);
                h = gating == GATING_GATE ? g * u : g * activate(activation, u);
            }
            hidden[at] = h;
            n_gate += active && is_fused;
            n_up += wanted;
            n_fired += h != 0.0f;
            read |= (active && is_fused ? MARK_GATE : 0) | (wanted ? MARK_UP : 0);
        }
        if (read) {
            atomicOr(&read_rows[my_row + r], read);
        }
    }
    atomicAdd(&n_pairs[PAIRS_GATE], n_gate);
    atomicAdd(&n_pairs[PAIRS_UP], n_up);
    atomicAdd(&n_pairs[PAIRS_FIRED], n_fired);
    __syncthreads();
    if (tid < SIDE && row0 + tid < n_owned) {
        mark(marks, row0 + tid, read_rows[tid]);
    }
    if (tid == 0) {
        count(counters, GATE_ROWS, n_pairs[PAIRS_GATE]);
        count(counters, UP_ROWS, n_pairs[PAIRS_UP]);
        count(counters, FIRED, n_pairs[PAIRS_FIRED]);
    }
}

// A step takes 32 rows and 8 chunks of their columns, which for some types do not lie together.
KERNEL(256, TYPED(down_matmul))(const u8* down, const float* hidden, const u64* bits, const u32* owned, float* y,
                                u32* marks, u64* counters, int n_embd, int n_owned, int n_ff, int accumulate,
                                int skip_zeros, int n_tokens) {
    SHARED(Quad, tile_w4, STEP* PITCH / 4);
    SHARED(Quad, tile_h4, STEP* PITCH / 4);
    // Rows that are read in a step, as bits; two steps take turns.
    SHARED(u32, read_rows, 2);
    SHARED(int, n_read, 1);
    float *tile_w = (float*)tile_w4, *tile_h = (float*)tile_h4;
    int chunk0 = blockIdx.x * (SIDE / 8), token0 = blockIdx.y * SIDE, tid = threadIdx.x;
    int my_column = tid % 16 * 4, my_token = tid / 16 * 4, turn = 0, n_mine = 0;
    bool whole = has_whole_chunks(down, n_embd), counts = blockIdx.x == 0;
    float sums[4][4] = {};
    // Each thread brings one chunk of a row, and the hidden values of 8 rows for a token.
    int lane_chunk = tid % 8, lane_row = tid / 8, lane_token = tid / 4, lane_rows = tid % 4 * 8;
    int token = token0 + lane_token;
    const float* values = hidden + (u64)min(token, n_tokens - 1) * n_owned;
    const u64* row_bits = bits ? bits + (u64)min(token, n_tokens - 1) * ((n_ff + 63) / 64) : 0;
    if (tid < 2) {
        read_rows[tid] = 0;
    }
    if (tid == 0) {
        n_read[0] = 0;
    }
    for (int k0 = 0; k0 < n_owned; k0 += STEP) {
        float ws[8], hs[8];
        const u8* row = down + (u64)min(k0 + lane_row, n_owned - 1) * Weights::row_bytes(n_embd);
        fetch_weights(row, chunk0 + lane_chunk, n_embd, whole, ws);
        u32 read = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int k = k0 + lane_rows + j;
            bool here = k < n_owned && token < n_tokens;
            hs[j] = here ? values[k] : 0.0f;
            if (counts && here && !(skip_zeros && hs[j] == 0.0f) && (!row_bits || bit_is_set(row_bits, owned[k]))) {
                read |= 1u << (lane_rows + j);
            }
        }
        n_mine += __popc(read);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // Weights of rows past the last meet zeros.
            tile_w[lane_row * PITCH + 8 * lane_chunk + j] = k0 + lane_row < n_owned ? ws[j] : 0.0f;
            tile_h[(lane_rows + j) * PITCH + lane_token] = hs[j];
        }
        if (read) {
            atomicOr(&read_rows[turn], read);
        }
        __syncthreads();
        if (counts && tid < STEP && read_rows[turn] >> tid & 1) {
            mark(marks, k0 + tid, MARK_DOWN);
        }
        turn ^= 1;
        if (tid == 0) {
            read_rows[turn] = 0;
        }
        multiply(tile_w, tile_h, my_column, my_token, sums);
    }
    if (n_mine) {
        atomicAdd(&n_read[0], n_mine);
    }
    Columns columns = Weights::columns(chunk0 + my_column / 8);
    int first = my_column % 8 < 4 ? columns.first : columns.second;
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int at_token = token0 + my_token + t;
            if (first + c < n_embd && at_token < n_tokens) {
                float* to = y + (u64)at_token * n_embd + first + c;
                *to = accumulate ? *to + sums[c][t] : sums[c][t];
            }
        }
    }
    __syncthreads();
    if (counts && tid == 0) {
        count(counters, DOWN_ROWS, n_read[0]);
    }
}

#ifdef EMULATED
EMULATED_MODULE(WEIGHT) {
    EMULATED_KERNEL(TYPED(embed));
    EMULATED_KERNEL(TYPED(matvec));
    EMULATED_KERNEL(TYPED(matvec_one));
    EMULATED_KERNEL(TYPED(matmul));
    EMULATED_KERNEL(TYPED(predict));
    EMULATED_KERNEL(TYPED(ffn_gate_list));
    EMULATED_KERNEL(TYPED(ffn_list));
    EMULATED_KERNEL(TYPED(ffn_gate_tile));
    EMULATED_KERNEL(TYPED(ffn_tile));
    EMULATED_KERNEL(TYPED(down_list));
    EMULATED_KERNEL(TYPED(down_tile));
    EMULATED_KERNEL(TYPED(ffn_matmul));
    EMULATED_KERNEL(TYPED(down_matmul));
}
#endif
