//! Choose tokens by a rule of your own: here none with the letter `e`, then the most probable one.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use powerinfer::tokenizer::{Encode, Tokenizer};
use powerinfer::{LoadOptions, Model, SessionOptions, TokenId};

fn is_allowed(tokenizer: &Tokenizer, id: TokenId) -> bool {
    let bytes = tokenizer.token_bytes(id, false).unwrap_or_default();
    !bytes.is_empty() && !bytes.contains(&b'e') && !bytes.contains(&b'E')
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let tokenizer = model.tokenizer();
    let how = Encode { parse_special: true, ..Encode::default() };
    let prompt = tokenizer.encode("<|endoftext|>A dog was", how)?;

    // The logits are a plain slice, one for each token of the vocabulary: anything may be done with them.
    let allowed: Vec<TokenId> =
        (0..tokenizer.n_vocab() as u32).map(TokenId).filter(|&id| is_allowed(tokenizer, id)).collect();
    let mut session = model.session(&SessionOptions::default())?;
    session.prefill(&prompt)?;
    let mut text = Vec::new();
    for _ in 0..40 {
        let logits = session.logits();
        let next = allowed
            .iter()
            .copied()
            .max_by(|a, b| logits[a.index()].total_cmp(&logits[b.index()]))
            .ok_or("no token is allowed")?;
        text.extend_from_slice(tokenizer.token_bytes(next, false).unwrap_or_default());
        session.decode(next)?;
    }
    let text = String::from_utf8_lossy(&text);
    assert!(!text.contains(['e', 'E']));
    println!("A dog was{text}");
    Ok(())
}
