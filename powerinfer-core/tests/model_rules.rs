//! Files that make a model and files that do not: each refusal names the key or tensor and the rule.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use powerinfer_core::{Device, LoadError, LoadOptions, Model, NoteLevel, SessionOptions};
use powerinfer_gguf::{GgmlType, Magic, Value};
#[cfg(feature = "cpu")]
use powerinfer_sparse_ops::BackendError;
use powerinfer_sparse_ops::{Activation, ActiveMode, ShapeError, TokenId, WeightType};
use support::{N_EMBD, N_FF, N_LAYER, N_VOCAB, TinyFile};

fn logits(model: &Model) -> Vec<f32> {
    let mut session = model.session(&SessionOptions::default()).unwrap();
    session.prefill(&[1, 40, 270, 99].map(TokenId)).unwrap().to_vec()
}

fn notes(model: &Model) -> String {
    model.notes().iter().map(|(_, line)| format!("{line}\n")).collect()
}

#[test]
fn numbers_that_make_no_model_are_refused_by_key_and_rule() {
    for (key, value, rule) in [
        ("llama.attention.head_count", Value::from(0u32), "1..="),
        ("llama.attention.head_count", Value::from(6u32), "divide the width 64"),
        ("llama.attention.head_count_kv", Value::from(3u32), "divide the 4 heads"),
        ("llama.attention.head_count_kv", Value::from(0u32), "1..="),
        ("llama.block_count", Value::from(0u32), "1..="),
        ("llama.block_count", Value::from(100_000u32), "1..=4096"),
        ("llama.rope.dimension_count", Value::from(7u32), "even"),
        ("llama.rope.dimension_count", Value::from(18u32), "2..=16"),
        ("llama.rope.freq_base", Value::from(0.0f32), "over 1"),
        ("llama.rope.scaling.type", Value::from("longrope"), "none, linear or yarn"),
        ("llama.rope.scaling.factor", Value::from(-2.0f32), "over 0"),
        ("llama.attention.layer_norm_rms_epsilon", Value::from(0.0f32), "over 0"),
        ("llama.attention.layer_norm_rms_epsilon", Value::from(f32::NAN), "finite"),
        ("llama.embedding_length", Value::from(0u32), "1..="),
        ("llama.context_length", Value::from(0u32), "1..="),
        ("llama.feed_forward_length", Value::from(vec![96u32, 96]), "1 or 12 entries"),
        ("llama.attention.head_count", Value::from(vec![4u32, 2]), "same one for every layer"),
        ("llama.hidden_act", Value::from("swiglu"), "relu, silu or gelu"),
    ] {
        let error = TinyFile::dense().set(key, value).error();
        match &error {
            LoadError::BadValue { key: k, rule: r, .. } => {
                assert!(k == key && r.contains(rule), "{key}: {error}");
            }
            other => panic!("{key}: {other:?}"),
        }
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn a_key_of_another_type_is_refused_and_a_missing_one_is_named() {
    let error = TinyFile::dense().set("llama.block_count", "twelve").error();
    assert!(
        matches!(error, LoadError::File(_)) && error.to_string().contains("llama.block_count"),
        "{error}"
    );
    let error = TinyFile::dense().remove("llama.attention.layer_norm_rms_epsilon").error();
    assert!(error.to_string().contains("llama.attention.layer_norm_rms_epsilon"), "{error}");
    assert!(matches!(error, LoadError::MissingKey { .. }));
    let error = TinyFile::dense().remove("general.architecture").error();
    assert!(error.to_string().contains("general.architecture"), "{error}");
}

#[test]
fn one_number_and_a_list_of_it_are_the_same_model() {
    let want = logits(&TinyFile::dense().load().unwrap());
    let mut file = TinyFile::dense();
    file.set("llama.feed_forward_length", vec![N_FF as u32; N_LAYER]);
    file.set("llama.attention.head_count_kv", vec![2u32; N_LAYER]);
    assert_eq!(logits(&file.load().unwrap()), want);
}

#[test]
fn an_unknown_architecture_is_named_with_the_list_of_known_ones() {
    let error = TinyFile::dense().set("general.architecture", "mamba").error();
    assert!(matches!(&error, LoadError::UnsupportedArch { arch, .. } if arch == "mamba"));
    assert!(error.to_string().contains("llama, bamboo, falcon, opt"), "{error}");
}

#[test]
fn a_missing_tensor_is_called_missing_and_not_truncated() {
    for name in ["blk.3.ffn_up.weight", "blk.11.attn_norm.weight", "output_norm.weight", "token_embd.weight"]
    {
        let error = TinyFile::dense().remove_tensor(name).error();
        assert!(matches!(&error, LoadError::MissingTensor { tensor, .. } if tensor == name), "{error}");
    }
}

#[test]
fn a_tied_output_equals_an_explicit_copy() {
    let mut file = TinyFile::dense();
    let embedding = file.values("token_embd.weight");
    file.tensor("output.weight", &[N_EMBD, N_VOCAB], embedding);
    let copy = logits(&file.load().unwrap());
    let tied = file.remove_tensor("output.weight").load().unwrap();
    assert_eq!(logits(&tied), copy);
    assert!(notes(&tied).contains("output tied"));
}

#[test]
fn tensors_of_another_shape_are_refused() {
    let n = N_EMBD;
    for (name, dims) in [
        ("blk.2.ffn_up.weight", [n, N_FF + 1]),
        ("blk.2.ffn_down.weight", [N_FF + 1, n]),
        ("blk.0.attn_k.weight", [n, n]),
        ("output.weight", [n, N_VOCAB + 1]),
    ] {
        let values = vec![0.0; dims[0] * dims[1]];
        let error = TinyFile::dense().tensor(name, &dims, values).error();
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(&format!("{dims:?}")), "{text}");
    }
    let error = TinyFile::dense().tensor("blk.1.attn_norm.weight", &[n + 1], vec![1.0; n + 1]).error();
    assert!(matches!(error, LoadError::Shape(ShapeError::Shape { .. })), "{error}");
    // 299 rows for 300 tokens.
    let error = TinyFile::dense().tensor("token_embd.weight", &[n, 299], vec![0.0; n * 299]).error();
    assert!(matches!(error, LoadError::VocabularySize { n_tokens: 300, n_rows: 299 }), "{error}");
}

#[test]
fn a_type_that_nothing_computes_with_is_refused_by_tensor() {
    // Rows of the 256 values that a block of these types has.
    for (name, ty) in [("blk.3.ffn_up.weight", GgmlType::IQ2_XXS), ("output.weight", GgmlType::IQ4_XS)] {
        let bytes = vec![0; 2 * ty.block_bytes()];
        let error = TinyFile::dense().raw_tensor(name, &[256, 2], ty, bytes).error();
        match &error {
            LoadError::UnsupportedType { tensor, ty: got, supported } => {
                assert!(tensor == name && *got == ty, "{error}");
                for known in WeightType::ALL {
                    assert!(supported.split(", ").any(|s| s == known.name()), "{known}: {error}");
                }
            }
            other => panic!("{name}: {other:?}"),
        }
        assert!(error.to_string().contains(name) && error.to_string().contains(ty.name()), "{error}");
    }
}

#[cfg(feature = "cpu")]
#[test]
fn a_type_without_a_kernel_in_its_role_is_refused_by_tensor_and_list() {
    let name = "blk.4.ffn_down_t.weight";
    let error = TinyFile::sparse().zero_bytes(name, GgmlType::Q4_1).error();
    match &error {
        LoadError::Backend(BackendError::UnsupportedType { tensor, ty, role, supported, .. }) => {
            assert!(tensor == name && *ty == WeightType::Q4_1 && role.contains("down"), "{error}");
            assert!(supported.contains(&WeightType::Q8_0) && !supported.contains(ty), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let text = error.to_string();
    assert!(text.contains(name) && text.contains("Q4_1") && text.contains("Q8_0"), "{text}");
    // In another role the type is fine.
    assert!(TinyFile::sparse().zero_bytes("blk.4.ffn_up.weight", GgmlType::Q4_1).load().is_ok());
}

#[test]
fn vocabulary_faults_are_vocabulary_errors() {
    for (key, value) in [
        ("tokenizer.ggml.scores", Value::from(vec![0.5f32; N_VOCAB - 1])),
        ("tokenizer.ggml.token_type", Value::from(vec![1i32; 7])),
        ("tokenizer.ggml.bos_token_id", Value::from(N_VOCAB as u32)),
        ("tokenizer.ggml.model", Value::from("unigram-ish")),
    ] {
        let error = TinyFile::dense().set(key, value).error();
        assert!(matches!(error, LoadError::Tokenizer(_)), "{key}: {error}");
    }
    // The right count in another type is a type error of the key.
    let error = TinyFile::dense().set("tokenizer.ggml.scores", vec![1u8; N_VOCAB]).error();
    assert!(error.to_string().contains("tokenizer.ggml.scores"), "{error}");
}

#[test]
fn the_activation_follows_the_key_and_the_rule_is_noted() {
    let with = |act: Option<&str>| {
        let mut file = TinyFile::dense();
        match act {
            Some(act) => file.set("llama.hidden_act", act),
            None => file.remove("llama.hidden_act"),
        };
        file.load().unwrap()
    };
    let (relu, silu, none) = (with(Some("relu")), with(Some("silu")), with(None));
    assert_ne!(logits(&relu), logits(&silu));
    assert_eq!(logits(&silu), logits(&none), "a dense llama file without the key means SiLU");
    assert!(notes(&relu).contains("activation relu (key `llama.hidden_act`)"), "{}", notes(&relu));
    assert!(notes(&none).contains("activation silu (default of `llama`"), "{}", notes(&none));
    assert_eq!(relu.default_mode(), ActiveMode::Exact);
    assert_eq!(silu.default_mode(), ActiveMode::Dense);

    let options = LoadOptions { activation: Some(Activation::Relu), ..LoadOptions::default() };
    let mut file = TinyFile::dense();
    let forced = file.set("llama.hidden_act", "silu").load_with(&options).unwrap();
    assert_eq!(logits(&forced), logits(&relu));
}

#[test]
fn a_file_that_is_relu_by_name_only_is_not_guessed() {
    let mut file = TinyFile::dense();
    let error = file.remove("llama.hidden_act").set("general.name", "ReluLLaMA-7B").error();
    assert!(matches!(error, LoadError::ActivationUnclear { .. }), "{error}");
    let options = LoadOptions { activation: Some(Activation::Relu), ..LoadOptions::default() };
    assert!(file.load_with(&options).is_ok());
}

#[test]
fn a_sparse_file_with_silu_is_refused() {
    let error = TinyFile::sparse().set("llama.hidden_act", "silu").error();
    assert!(matches!(error, LoadError::SparseActivation { activation: "silu" }), "{error}");
}

#[test]
fn sparse_and_dense_files_of_the_same_weights_compute_the_same_exactly() {
    let sparse = TinyFile::sparse().load().unwrap();
    assert_eq!(sparse.default_mode(), ActiveMode::Predictor);
    let exact = |model: &Model, mode| {
        let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        session.prefill(&[1, 40, 270, 99].map(TokenId)).unwrap().to_vec()
    };
    let dense = TinyFile::dense().load().unwrap();
    let want = exact(&dense, ActiveMode::Dense);
    for (model, mode) in
        [(&dense, ActiveMode::Exact), (&sparse, ActiveMode::Exact), (&sparse, ActiveMode::Dense)]
    {
        assert_eq!(exact(model, mode), want, "{mode:?}");
    }
    assert_ne!(exact(&sparse, ActiveMode::Predictor), want, "these predictors leave neurons out");
}

#[test]
fn a_predictor_missing_in_one_layer_is_an_error_or_a_noted_fallback() {
    let mut file = TinyFile::sparse();
    file.remove_tensor("blk.5.fc1.weight").remove_tensor("blk.5.fc2.weight");
    let error = file.error();
    assert!(error.to_string().contains("blk.5.fc1.weight"), "{error}");
    let options = LoadOptions { allow_missing_predictors: true, ..LoadOptions::default() };
    let model = file.load_with(&options).unwrap();
    let warning = model.notes().iter().find(|(level, _)| *level == NoteLevel::Warning).unwrap();
    assert!(warning.1.contains("no predictor in layers 5"), "{}", warning.1);
    // Half a predictor is never a fallback.
    let error = TinyFile::sparse().remove_tensor("blk.5.fc2.weight").load_with(&options).unwrap_err();
    assert!(error.to_string().contains("blk.5.fc2.weight"), "{error}");
}

#[test]
fn a_predictor_of_another_width_is_refused() {
    let error =
        TinyFile::sparse().tensor("blk.7.fc2.weight", &[8, N_FF + 4], vec![0.0; 8 * (N_FF + 4)]).error();
    assert!(error.to_string().contains("blk.7.fc2.weight"), "{error}");
}

#[test]
fn predictor_mode_without_predictors_is_refused() {
    let options = LoadOptions { mode: Some(ActiveMode::Predictor), ..LoadOptions::default() };
    let error = TinyFile::dense().load_with(&options).unwrap_err();
    assert!(matches!(error, LoadError::NoPredictors), "{error}");
    let model = TinyFile::dense().load().unwrap();
    let options = SessionOptions { mode: Some(ActiveMode::Predictor), ..SessionOptions::default() };
    assert!(model.session(&options).is_err());
}

#[test]
fn the_magic_alone_tells_sparse_from_dense() {
    let mut file = TinyFile::dense();
    file.magic = Magic::Pwri;
    let error = file.error();
    assert!(error.to_string().contains("ffn_down_t") && error.to_string().contains("PWRI"), "{error}");
}

#[test]
fn tensors_beside_the_computation_are_noted_and_those_of_it_are_refused() {
    let mut file = TinyFile::dense();
    file.tensor("training.step", &[4], vec![0.0; 4]);
    let text = notes(&file.load().unwrap());
    assert!(text.contains("1 tensors of the file are not used, such as `training.step`"), "{text}");
    // A bias that nothing adds would silently make another function.
    for name in ["blk.3.ffn_gate.bias", "blk.0.attn_q_norm.weight", "output.bias"] {
        let error = TinyFile::dense().tensor(name, &[N_FF], vec![0.5; N_FF]).error();
        assert!(matches!(&error, LoadError::UnknownTensor { tensor, .. } if tensor == name), "{error}");
    }
    let error = TinyFile::dense().set("llama.expert_count", 8u32).error();
    assert!(error.to_string().contains("mixtures of experts"), "{error}");
}

#[test]
fn predictors_are_not_used_with_an_activation_without_exact_zeros() {
    let mut file = TinyFile::dense();
    for layer in 0..N_LAYER {
        file.tensor(&format!("blk.{layer}.fc1.weight"), &[N_EMBD, 4], vec![0.1; N_EMBD * 4]);
        file.tensor(&format!("blk.{layer}.fc2.weight"), &[4, N_FF], vec![-0.1; 4 * N_FF]);
    }
    let relu = file.load().unwrap();
    assert!(relu.has_predictors() && relu.default_mode() == ActiveMode::Predictor);
    let silu = file.set("llama.hidden_act", "silu").load().unwrap();
    assert!(!silu.has_predictors() && silu.default_mode() == ActiveMode::Dense);
    assert!(notes(&silu).contains("predictors are not used"), "{}", notes(&silu));
    let options = LoadOptions { mode: Some(ActiveMode::Predictor), ..LoadOptions::default() };
    assert!(matches!(file.load_with(&options), Err(LoadError::NoPredictors)));
    // Half of the layers is an error here as well.
    file.set("llama.hidden_act", "relu").remove_tensor("blk.2.fc1.weight").remove_tensor("blk.2.fc2.weight");
    assert!(file.error().to_string().contains("blk.2.fc1.weight"));
}

#[test]
fn a_predictor_of_rank_one_may_lack_its_last_dimension() {
    let mut file = TinyFile::sparse();
    file.tensor("blk.4.fc1.weight", &[N_EMBD], vec![0.1; N_EMBD]);
    file.tensor("blk.4.fc2.weight", &[1, N_FF], vec![0.1; N_FF]);
    assert!(file.load().is_ok());
    let error = TinyFile::dense()
        .tensor("blk.1.ffn_up.weight", &[N_EMBD, N_FF / 2, 2], vec![0.0; N_EMBD * N_FF])
        .error();
    assert!(matches!(error, LoadError::NoMatrix { .. }), "{error}");
}

#[test]
fn sizes_beyond_reason_are_refused_before_anything_is_allocated() {
    for n_batch in [0, usize::MAX, 1 << 40] {
        let options = LoadOptions { n_batch, ..LoadOptions::default() };
        let error = TinyFile::dense().load_with(&options).unwrap_err();
        assert!(matches!(error, LoadError::BatchSize { .. }), "{error}");
    }
    for device in [Device::default(), Device::Reference(powerinfer_core::Rounding::None)] {
        let options = LoadOptions { device, ..LoadOptions::default() };
        let model = TinyFile::dense().load_with(&options).unwrap();
        for n_ctx in [0, usize::MAX, 1 << 60] {
            let options = SessionOptions { n_ctx: Some(n_ctx), ..SessionOptions::default() };
            assert!(model.session(&options).is_err(), "{n_ctx}");
        }
        assert!(model.session(&SessionOptions::default()).is_ok());
    }
}

#[cfg(feature = "cpu")]
#[test]
fn a_million_threads_are_refused() {
    for threads in [1025, 1 << 40, usize::MAX] {
        let device = Device::Cpu(powerinfer_core::CpuOptions { threads, ..Default::default() });
        let options = LoadOptions { device, ..LoadOptions::default() };
        let error = TinyFile::dense().load_with(&options).unwrap_err();
        assert!(error.to_string().contains("1024"), "{error}");
    }
}

#[test]
fn gates_with_columns_of_another_size_are_reported() {
    let mut file = TinyFile::sparse();
    assert!(!notes(&file.load().unwrap()).contains("the usual size"));
    for layer in [0, 1, 2, 5] {
        let name = format!("blk.{layer}.ffn_gate.weight");
        let mut gate = file.values(&name);
        let n_outliers = if layer == 5 { 3 } else { 1 };
        gate.chunks_mut(N_EMBD).for_each(|row| row[..n_outliers].iter_mut().for_each(|w| *w *= 30.0));
        file.tensor(&name, &[N_EMBD, N_FF], gate);
    }
    let notes = notes(&file.load().unwrap());
    assert!(notes.contains("gates of layers 0-2, 5 have 1 to 3 columns of more than 4 times"), "{notes}");
}
