// How products of rows and vectors are shared out: a warp takes two rows and up to 8 vectors.
#pragma once
#include "blocks.cuh"

// Rows of a warp, warps of a block, tokens that share the reading of a row.
#define ROWS 2
#define WARPS 4
#define TILE 8
#define PAIRS (ROWS * TILE)

DEVICE void two_rows(const u8* w, u64 row_bytes, int first, int n, const u8* (&out)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        out[r] = w + (u64)min(first + r, n - 1) * row_bytes;
    }
}

DEVICE int first_row() {
    return (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
}

// Sums N values of each lane over the warp, as a tree: lanes 16 apart, then 8, and so on. While more than one value is
// left, each of two lanes takes one half of them. Lane l ends up with value l * N / 32.
template <int N>
DEVICE float warp_sums(float (&v)[N]) {
#ifdef EMULATED
    if (emulator::sum_at_one_meeting(v, N)) {
        return v[0];
    }
#endif
    int lane = threadIdx.x % 32, offset = 16;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2) {
        bool upper = lane & offset;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i < n) {
                float kept = upper ? v[n + i] : v[i], sent = upper ? v[i] : v[n + i];
                v[i] = kept + __shfl_xor_sync(FULL_WARP, sent, offset);
            }
        }
        offset /= 2;
    }
#pragma unroll
    for (; offset > 0; offset /= 2) {
        v[0] += __shfl_xor_sync(FULL_WARP, v[0], offset);
    }
    return v[0];
}

// Which of N pairs this lane gets from `dot`.
template <int N>
DEVICE int pair_of() {
    return threadIdx.x % 32 / (32 / N);
}

// Whether this lane is the first of those that get the same pair.
template <int N>
DEVICE bool is_first_of_pair() {
    return threadIdx.x % (32 / N) == 0;
}

enum { ACCUMULATE = 1, RECTIFY = 2 };

DEVICE void store(float* to, float v, float bias, int flags) {
    v += bias;
    if (flags & RECTIFY) {
        v = v > 0.0f ? v : 0.0f;
    }
    *to = flags & ACCUMULATE ? *to + v : v;
}

