//! A decode step allocates nothing, on any thread. Alone in its process, so that nobody else is counted.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use powerinfer_core::{LoadOptions, Model, SessionOptions};
use powerinfer_sparse_ops::{ActiveMode, TokenId, WeightType};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure_all_threads};
use powerinfer_testing::tiny::Random;
use support::{N_EMBD, N_FF, N_LAYER, TinyFile};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const ATTENTION: [&str; 4] = ["attn_q", "attn_k", "attn_v", "attn_output"];
const FFN: [&str; 4] = ["ffn_gate", "ffn_up", "ffn_down", "ffn_down_t"];

/// Predictors of a rank that is a whole block.
fn with_quantised_predictors(ty: WeightType) -> TinyFile {
    const RANK: usize = 32;
    let mut file = TinyFile::sparse();
    let mut random = Random::new(6);
    for layer in 0..N_LAYER {
        let fc1 = random.normals(N_EMBD * RANK, 0.2);
        file.tensor(&format!("blk.{layer}.fc1.weight"), &[N_EMBD, RANK], fc1);
        let fc2 = random.normals(RANK * N_FF, 0.5);
        file.tensor(&format!("blk.{layer}.fc2.weight"), &[RANK, N_FF], fc2);
    }
    file.encode(ty, &["fc1", "fc2"]).encode(ty, &FFN);
    file
}

/// Every layout of the FFN with every type of activations.
fn models() -> Vec<(String, Model)> {
    let mut models = vec![
        ("sparse F32".to_owned(), TinyFile::sparse().load().unwrap()),
        ("dense F32".to_owned(), TinyFile::dense().load().unwrap()),
        ("embedded".to_owned(), {
            Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default()).unwrap()
        }),
    ];
    for ty in [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0] {
        let everything = [&ATTENTION[..], &FFN, &["token_embd", "output"]].concat();
        // By output, blocks over neurons: relaid where the activation has exact zeros, and as they are.
        for activation in ["relu", "silu"] {
            let mut file = TinyFile::dense();
            file.set("llama.hidden_act", activation).encode(ty, &everything);
            models.push((format!("dense {ty}, {activation}"), file.load().unwrap()));
        }
        let model = with_quantised_predictors(ty).load().unwrap();
        models.push((format!("sparse {ty} with predictors in it"), model));
    }
    models
}

#[test]
fn a_decode_step_allocates_nothing() {
    for (what, model) in models() {
        for mode in [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor] {
            if mode == ActiveMode::Predictor && !model.has_predictors() {
                continue;
            }
            let options = SessionOptions { n_ctx: Some(64), mode: Some(mode) };
            let mut session = model.session(&options).unwrap();
            session.prefill(&[1, 5, 9].map(TokenId)).unwrap();
            session.decode(TokenId(7)).unwrap();
            let ((), stats) = measure_all_threads(|| {
                for id in 8..30 {
                    session.decode(TokenId(id)).unwrap();
                }
            });
            assert_eq!(stats.n_allocs, 0, "{what}, {mode:?}");
        }
    }
}
