// How rows of each weight type become floats, eight weights at a time.
//
// A chunk is 8 weights that lie together in memory: two runs of 4 columns, `first` and `second`. Chunk i of a row is
// taken by lane i % 32, so that a warp reads a row in order. Chunks of plain types must start on a multiple of 16 bytes;
// where a row does not, `one` reads its weights singly. The layouts are those of the file; powerinfer-sparse-ops
// describes them in `block::layout`. The operations are those of its decoders, so the floats are the same.
#pragma once
#include "common.cuh"

struct Columns {
    int first, second;
};

DEVICE u32 load_u32_by_2(const u8* p) {
    const u16* h = (const u16*)p;
    return (u32)h[0] | (u32)h[1] << 16;
}

DEVICE float load_half(const u8* p) {
    return half_to_float(*(const u16*)p);
}

DEVICE float byte_of(u32 word, int i) {
    return (float)(int)(i8)(word >> (8 * i));
}

DEVICE float nibble_of(u32 word, int i) {
    return (float)(word >> (8 * i) & 15);
}

struct PlainColumns {
    static const bool BLOCKS = false;
    // Chunks of two rows that one lane asks for together where there is one vector.
    static const int AHEAD = 4;
    DEVICE Columns columns(int i) {
        return {8 * i, 8 * i + 4};
    }
};

struct Weights_f32 : PlainColumns {
    static const int ELEMENT_BYTES = 4;
    DEVICE u64 row_bytes(int n) {
        return (u64)n * 4;
    }
    DEVICE float one(const u8* row, int i) {
        return ((const float*)row)[i];
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        const float* p = (const float*)row + 8 * i;
        Quad a = load_quad(p), b = load_quad(p + 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[j] = a.v[j];
            w[4 + j] = b.v[j];
        }
    }
};

// Eight numbers of 16 bits, or four of 32.
struct alignas(16) Words {
    u32 v[4];
};

struct Weights_f16 : PlainColumns {
    static const int ELEMENT_BYTES = 2;
    DEVICE u64 row_bytes(int n) {
        return (u64)n * 2;
    }
    DEVICE float one(const u8* row, int i) {
        return half_to_float(((const u16*)row)[i]);
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        Words words = *(const Words*)(row + 16 * i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            w[j] = half_to_float((u16)(words.v[j / 2] >> (16 * (j % 2))));
        }
    }
};

struct Weights_bf16 : PlainColumns {
    static const int ELEMENT_BYTES = 2;
    DEVICE u64 row_bytes(int n) {
        return (u64)n * 2;
    }
    DEVICE float one(const u8* row, int i) {
        return bfloat_to_float(((const u16*)row)[i]);
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        Words words = *(const Words*)(row + 16 * i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            w[j] = bfloat_to_float((u16)(words.v[j / 2] >> (16 * (j % 2))));
        }
    }
};

// What block types have no use for: rows are whole blocks.
struct BlockRows {
    static const bool BLOCKS = true;
    static const int AHEAD = 4;
    static const int ELEMENT_BYTES = 1;
    DEVICE float one(const u8* row, int i) {
        return 0.0f;
    }
};

struct Weights_q8_0 : BlockRows {
    DEVICE u64 row_bytes(int n) {
        return (u64)(n / 32) * 34;
    }
    DEVICE Columns columns(int i) {
        return {8 * i, 8 * i + 4};
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        const u8* block = row + (u64)(i / 4) * 34;
        float d = load_half(block);
        const u8* p = block + 2 + i % 4 * 8;
        u32 low = load_u32_by_2(p), high = load_u32_by_2(p + 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[j] = byte_of(low, j) * d;
            w[4 + j] = byte_of(high, j) * d;
        }
    }
};

struct Weights_q4_0 : BlockRows {
    DEVICE u64 row_bytes(int n) {
        return (u64)(n / 32) * 18;
    }
    DEVICE Columns columns(int i) {
        int first = i / 4 * 32 + i % 4 * 4;
        return {first, first + 16};
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        const u8* block = row + (u64)(i / 4) * 18;
        float d = load_half(block);
        u32 q = load_u32_by_2(block + 2 + i % 4 * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[j] = (nibble_of(q, j) - 8.0f) * d;
            w[4 + j] = (nibble_of(q >> 4, j) - 8.0f) * d;
        }
    }
};

struct Weights_q4_k : BlockRows {
    // More would take over 100 registers.
    static const int AHEAD = 2;
    DEVICE u64 row_bytes(int n) {
        return (u64)(n / 256) * 144;
    }
    DEVICE Columns columns(int i) {
        int first = i / 8 * 64 + i % 8 * 4;
        return {first, first + 32};
    }
    // Scale and minimum of group g, 6 bits each.
    DEVICE void group(const u8* packed, int g, int& scale, int& min) {
        if (g < 4) {
            scale = packed[g] & 63;
            min = packed[g + 4] & 63;
        } else {
            scale = (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
            min = packed[g + 4] >> 4 | packed[g] >> 6 << 4;
        }
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        const u8* block = row + (u64)(i / 32) * 144;
        int a = i % 32 / 8, c = i % 8 * 4, scale, min;
        float d = load_half(block), dmin = load_half(block + 2);
        u32 q = load_u32_by_2(block + 16 + 32 * a + c);
        group(block + 4, 2 * a, scale, min);
        float s0 = d * (float)scale, m0 = dmin * (float)min;
        group(block + 4, 2 * a + 1, scale, min);
        float s1 = d * (float)scale, m1 = dmin * (float)min;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[j] = s0 * nibble_of(q, j) - m0;
            w[4 + j] = s1 * nibble_of(q >> 4, j) - m1;
        }
    }
};

struct Weights_q6_k : BlockRows {
    // More would take over 100 registers.
    static const int AHEAD = 2;
    DEVICE u64 row_bytes(int n) {
        return (u64)(n / 256) * 210;
    }
    DEVICE Columns columns(int i) {
        int first = i / 16 * 128 + i % 16 / 8 * 32 + i % 8 * 4;
        return {first, first + 64};
    }
    DEVICE void chunk(const u8* row, int i, float* w) {
        const u8* block = row + (u64)(i / 32) * 210;
        int a = i % 32 / 16, b = i % 16 / 8, c = i % 8 * 4;
        u32 low = load_u32_by_2(block + 64 * a + 32 * b + c);
        u32 high = load_u32_by_2(block + 128 + 32 * a + c) >> (2 * b);
        const i8* scales = (const i8*)block + 192 + 8 * a + 2 * b + c / 16;
        float d = load_half(block + 208), s0 = d * (float)scales[0], s1 = d * (float)scales[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 q0 = (low >> (8 * j) & 15) | (high >> (8 * j) & 3) << 4;
            u32 q1 = (low >> (8 * j + 4) & 15) | (high >> (8 * j + 4) & 3) << 4;
            w[j] = s0 * (float)((int)q0 - 32);
            w[4 + j] = s1 * (float)((int)q1 - 32);
        }
    }
};
