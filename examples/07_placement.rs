//! Plans which neurons of a model go to a second device, prints the plan and runs it.
//!
//! The device here is the slow reference backend with a budget of 2 MiB, so that the example runs anywhere; a GPU is
//! `Device::Cuda` with the feature `cuda`. The text is that of the host alone.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use std::error::Error;

use powerinfer::placement::{Accelerator, Bandwidth, Budget, Host, PlanOptions, PlanTable, Statistics};
use powerinfer::profile::{ProfileOptions, profile};
use powerinfer::sampling::SamplingParams;
use powerinfer::tokenizer::Encode;
use powerinfer::{CancelToken, Device, GenerateOptions, LoadOptions, Model, Rounding, SessionOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let on_host = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let how = Encode { add_special: true, parse_special: false };
    let prompt = on_host.tokenizer().encode("Once upon a time, there was a little", how)?;

    // How often each neuron fires, on far too little text.
    let options = ProfileOptions { n_tokens: 256, ..ProfileOptions::default() };
    let text =
        on_host.tokenizer().encode("The dog ran to the park. It saw a big red ball and was happy.", how)?;
    let counts = profile(&on_host, &[text], &options, &CancelToken::new(), &mut |_, _| ())?;

    let host = Host { name: "host".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 35e9 } };
    let device = Accelerator {
        name: "device".to_owned(),
        free_bytes: 1 << 30,
        budget: Budget::Bytes(2 << 20),
        bandwidth: Bandwidth { dense: 800e9, gather: 600e9 },
        link: 25e9,
        latency: 1e-7,
        granule: 256,
        kv_value_bytes: 2,
    };
    let statistics = Statistics::Counts(Box::new(counts));
    let plan = PlanOptions { n_ctx: Some(64), ..PlanOptions::new(host, vec![device], statistics) };
    let options = LoadOptions {
        accelerators: vec![Device::Reference(Rounding::None)],
        plan: Some(plan),
        n_batch: 16,
        ..LoadOptions::default()
    };
    let split = Model::from_bytes(powerinfer_demo_model::MODEL, &options)?;
    println!("{}\n", PlanTable(split.placement().expect("a plan was asked for")));

    let mut texts = Vec::new();
    for model in [&on_host, &split] {
        let mut session = model.session(&SessionOptions { n_ctx: Some(64), ..SessionOptions::default() })?;
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let options = GenerateOptions { sampling, max_tokens: Some(24), ..GenerateOptions::default() };
        let mut text = String::new();
        for piece in session.generate(&prompt, options)? {
            text += &piece?.text;
        }
        texts.push(text);
    }
    println!("{}", texts[0]);
    assert_eq!(texts[0], texts[1], "a placement changes no text");
    Ok(())
}
