//! A bounded fuzz run: whatever the bytes, parsing gives a file or a typed error, in bounded memory, and a
//! file that was accepted can be used in every way.
#![allow(clippy::unwrap_used, reason = "a failure of a helper fails its test")]

mod support;

use powerinfer_gguf::{ArrayRef, GgufFile, GpuIndex, ValueRef};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use support::{ARRAY, BOOL, I32, Raw, STRING, U8, array, good, nested, string};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let index = Raw { magic: *b"PWRI", ..Raw::new() }
        .key_str("general.architecture", "generic.gpu_index")
        .key_u32("generic.gpu_index.block_count", 1)
        .key("split.vram_capacity", 10, [0; 8])
        .tensor("blk.0.gpu_idx", &[4], 18, 0)
        .tensor("blk.0.gpu_bucket", &[0], 18, 32)
        .data(32);
    let arrays = Raw { version: 2, ..Raw::new() }
        .key("nested", ARRAY, nested(4))
        .key("bools", ARRAY, array(BOOL, 3, &[1, 0, 1]))
        .key("empty", ARRAY, array(STRING, 0, &[]))
        .key(
            "lists",
            ARRAY,
            array(ARRAY, 2, &[array(I32, 1, &[1, 0, 0, 0]), array(STRING, 1, &string(b"x"))].concat()),
        )
        .key("numbers", ARRAY, array(11, 2, &[0xff; 16]))
        .key("byte", U8, [3])
        .key_u32("general.alignment", 64);
    let types =
        (0..48).filter(|id| powerinfer_gguf::GgmlType::from_id(*id, powerinfer_gguf::Magic::Gguf).is_some());
    let mut offset = 0;
    let mut all_types = Raw::new();
    for id in types {
        let ty = powerinfer_gguf::GgmlType::from_id(id, powerinfer_gguf::Magic::Gguf).unwrap();
        let (n_cols, n_rows) = (ty.block_len() as u64, 3);
        all_types = all_types.tensor(format!("t{id}"), &[n_cols, n_rows], id, offset);
        offset += (3 * ty.block_bytes() as u64).next_multiple_of(32);
    }
    let all_types = all_types.data(offset as usize);
    let mut arrays = arrays;
    arrays.alignment = 64;
    [good(), index, arrays, all_types].map(|raw| raw.build()).into()
}

fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(4) {
        // The header is the front of the file, so that is hit more often.
        let span = if random.below(2) == 0 { 64 } else { bytes.len() };
        let at = random.below(span.min(bytes.len()));
        match random.below(7) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let number = [0, 1, 12, 13, 255, 1 << 31, 1 << 32, 1 << 58, 1 << 63, u64::MAX, random.next()]
                    [random.below(11)];
                let end = (at + [1, 4, 8][random.below(3)]).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            3 => bytes.truncate(at.max(1)),
            4 => {
                let from = random.below(bytes.len());
                let end = (from + random.below(64)).min(bytes.len());
                let copied = bytes[from..end].to_vec();
                bytes.splice(at..at, copied);
            }
            5 => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.drain(at..end);
                bytes.push(0);
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                bytes.truncate(at.max(1));
                bytes.extend_from_slice(&other[random.below(other.len())..]);
            }
        }
    }
    bytes
}

fn walk(array: ArrayRef<'_>) -> usize {
    let elements = array.iter().map(|element| match element {
        ValueRef::Array(inner) => walk(inner),
        _ => 1,
    });
    assert_eq!(array.iter().count(), array.len());
    elements.sum()
}

/// Uses everything that an accepted file offers.
fn exercise(file: &GgufFile) {
    let keys = file.metadata();
    for (key, value) in keys.iter() {
        assert_eq!(keys.get(key).map(ValueRef::ty), Some(value.ty()));
        assert!(keys.offset(key).is_some());
        if let ValueRef::Array(array) = value {
            walk(array);
        }
        let _ = value.to_value();
        let _ = (
            keys.require::<u8>(key),
            keys.require::<u32>(key),
            keys.require::<i32>(key),
            keys.require::<u64>(key),
        );
        let _ = (
            keys.require::<f32>(key),
            keys.require::<f64>(key),
            keys.require::<bool>(key),
            keys.require::<i64>(key),
        );
        let _ = (keys.require::<&str>(key), keys.require::<&[u8]>(key), keys.require::<ArrayRef<'_>>(key));
        let _ =
            (keys.require::<Vec<&str>>(key), keys.require::<Vec<&[u8]>>(key), keys.require::<Vec<f32>>(key));
        let _ = (keys.require::<Vec<i32>>(key), keys.require::<Vec<bool>>(key), keys.u32_or_array(key));
    }
    let mut end = file.data_range().start;
    for tensor in file.tensors() {
        assert!(
            tensor.offset() >= end && tensor.offset() + tensor.n_bytes() <= file.bytes().len(),
            "{tensor:?}"
        );
        end = tensor.offset() + tensor.n_bytes();
        assert_eq!(tensor.as_slice().len(), tensor.n_bytes());
        assert_eq!(tensor.bytes().as_slice(), tensor.as_slice());
        assert_eq!(file.tensor(tensor.name()).map(|found| found.offset()), Some(tensor.offset()));
        assert_eq!(tensor.decode().is_ok(), tensor.ty().weight_type().is_some());
        let _ = (tensor.i32_values(), tensor.check_finite(), format!("{tensor:?}"));
    }
    let _ = (GpuIndex::parse(file), format!("{file:?}"), format!("{keys:?}"));
}

#[test]
fn any_bytes_give_a_file_or_an_error_in_bounded_memory() {
    let seeds = seeds();
    for seed in &seeds {
        exercise(&GgufFile::from_bytes(seed.clone()).unwrap());
    }
    let mut random = Random(20_240_817);
    let mut n_accepted = 0;
    let mut kinds = std::collections::HashSet::new();
    for round in 0..60_000 {
        let bytes = mutate(&mut random, &seeds);
        let n_bytes = bytes.len() as u64;
        let (result, stats) = measure(|| GgufFile::from_bytes(bytes));
        assert!(stats.peak_bytes <= 4 * n_bytes + (1 << 20), "round {round}: {stats:?} for {n_bytes} bytes");
        match result {
            Ok(file) => {
                n_accepted += 1;
                exercise(&file);
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                kinds.insert(std::mem::discriminant(&error));
            }
        }
    }
    // The run is worth something only if both sides of most checks were seen.
    assert!(n_accepted > 1000, "{n_accepted}");
    assert!(kinds.len() >= 20, "{}", kinds.len());
}
