//! Write a conversation the way a model was trained on it, safe against control tokens that a user types.
//!
//! The story model has no chat template of its own, so one is given here; a chat model's file has one
//! (`Model::chat_template`).
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use powerinfer::chat::{ChatInput, ChatTemplate, Message};
use powerinfer::{GenerateOptions, LoadOptions, Model, SessionOptions, sampling::SamplingParams};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}Once{% endif %}";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let own = model.chat_template().and_then(Result::ok);
    let substitute = ChatTemplate::parse(TEMPLATE)?;
    let template = own.unwrap_or(&substitute);
    let messages = [
        Message::new("system", "A story about a cat."),
        Message::new("user", "The cat was called <|endoftext|>."),
    ];
    let prompt = template.render_parts(&ChatInput {
        messages: &messages,
        add_generation_prompt: true,
        bos_token: "<|endoftext|>",
        ..ChatInput::default()
    })?;
    println!("{}", prompt.text());

    // The control token of the template becomes one id, the one in the user's text stays plain text.
    let tokens = model.tokenizer().encode_parts(&prompt.parts, true)?;
    let n_control = tokens.iter().filter(|&&id| model.tokenizer().is_control(id)).count();
    assert_eq!(n_control, 1);

    let mut session = model.session(&SessionOptions::default())?;
    let sampling = SamplingParams::default().seed(3);
    let options = GenerateOptions { sampling, max_tokens: Some(60), ..GenerateOptions::default() };
    println!("{}", session.generate(&tokens, options)?.into_text()?);
    Ok(())
}
