//! Logits of the original engine for small models, carried in the program that compares them.

use std::error::Error;

use powerinfer_core::{Device, LoadOptions, Model, SessionOptions, TokenId};
use serde_json::Value;

macro_rules! goldens {
    ($($name:literal),+ $(,)?) => {
        &[$(Golden {
            name: $name,
            model: include_bytes!(concat!("../../../powerinfer-core/tests/data/golden/", $name, ".gguf")),
            info: include_str!(concat!("../../../powerinfer-core/tests/data/golden/", $name, ".json")),
            logits: include_bytes!(concat!("../../../powerinfer-core/tests/data/golden/", $name, ".logits.f32")),
        }),+]
    };
}

struct Golden {
    name: &'static str,
    model: &'static [u8],
    info: &'static str,
    logits: &'static [u8],
}

const GOLDENS: &[Golden] = goldens![
    "bamboo-q4_0",
    "dense-bamboo-q4_0",
    "dense-llama-q4_0",
    "falcon40-q4_0",
    "falcon7-f16",
    "llama-mixed-attn-q8_0",
    "llama-mixed-kquant",
    "opt-q4_0",
];

/// Compares every golden with what a device computes, and tells a line for each. Returns the names of those that the device
/// refuses.
///
/// # Panics
/// If logits are beyond the limits that the golden states, or the greedy text is another.
pub(crate) fn check(
    device: &Device,
    say: &mut dyn FnMut(String),
) -> Result<Vec<&'static str>, Box<dyn Error>> {
    let mut refused = Vec::new();
    for golden in GOLDENS {
        let info: Value = serde_json::from_str(golden.info)?;
        let ids = |key: &str| -> Vec<u32> {
            let list = info[key].as_array().map_or(&[][..], Vec::as_slice);
            list.iter().filter_map(Value::as_u64).map(|id| id as u32).collect()
        };
        let (prompt, greedy) = (ids("prompt_ids"), ids("greedy_ids"));
        let fed: Vec<TokenId> =
            prompt.iter().chain(&greedy[..greedy.len() - 1]).copied().map(TokenId).collect();
        let want: Vec<f32> =
            golden.logits.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let n_vocab = want.len() / fed.len();
        let limit = |part: &str| info["tolerance_float_activations"][part].as_f64().unwrap_or(0.0);
        let options = LoadOptions { device: device.clone(), ..LoadOptions::default() };
        let model = match Model::from_bytes(golden.model.to_vec(), &options) {
            Ok(model) => model,
            Err(error) => {
                say(format!("golden {:<22} refused: {error}", golden.name));
                refused.push(golden.name);
                continue;
            }
        };
        let mut worst = (0f64, 0f64);
        for chunk in [32, 1] {
            let mut session = model.session(&SessionOptions::default())?;
            let mut got = Vec::with_capacity(want.len());
            for ids in fed.chunks(chunk) {
                session.evaluate(ids, |_, row| got.extend_from_slice(row))?;
            }
            assert_eq!(got.len(), want.len(), "{}: logits", golden.name);
            for (got, want) in got.chunks(n_vocab).zip(want.chunks(n_vocab)) {
                let diffs = || got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w));
                let (diff, norm) =
                    (diffs().map(|d| d * d).sum::<f64>(), want.iter().map(|w| f64::from(w * w)).sum::<f64>());
                assert!(diff.is_finite(), "{}: a logit is no number", golden.name);
                worst.0 = diffs().fold(worst.0, |m, d| m.max(d.abs()));
                worst.1 = worst.1.max((diff / norm).sqrt());
            }
            let rows = got.chunks(n_vocab).skip(prompt.len() - 1);
            let text: Vec<u32> = rows.map(arg_max).collect();
            assert_eq!(text, greedy, "{}: greedy text in chunks of {chunk}", golden.name);
        }
        assert!(
            worst.0 <= limit("max_abs") && worst.1 <= limit("rel_l2"),
            "{}: max_abs {:.1e}, rel_l2 {:.1e} are beyond {}",
            golden.name,
            worst.0,
            worst.1,
            info["tolerance_float_activations"]
        );
        say(format!("golden {:<22} ok   max_abs {:.1e}  rel_l2 {:.1e}", golden.name, worst.0, worst.1));
    }
    Ok(refused)
}

fn arg_max(row: &[f32]) -> u32 {
    (0..row.len()).reduce(|best, ix| if row[ix] > row[best] { ix } else { best }).unwrap_or(0) as u32
}
