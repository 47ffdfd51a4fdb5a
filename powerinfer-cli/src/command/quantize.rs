//! `powerinfer quantize`: the flags of [`crate::convert::quantize`].

use crate::args::QuantizeArgs;
use crate::convert::quantize::{QuantizeRequest, quantize};
use crate::error::CliError;
use crate::output::{bytes, print, table, with_tensor_bar};

pub(crate) fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let request = QuantizeRequest {
        model: args.model.clone(),
        output: args.out.clone(),
        matrix_type: args.matrix_type,
        replace: args.force,
    };
    let report = with_tensor_bar(|progress| quantize(&request, progress))?;
    let mut rows = vec![["matrix", "count", "from", "to", "relative RMS error"].map(str::to_owned).to_vec()];
    rows.extend(report.kinds.iter().map(|kind| {
        let count = kind.count.to_string();
        vec![kind.name.clone(), count, kind.from.to_string(), kind.to.to_string(), kind.error.to_string()]
    }));
    let size = bytes(report.output_bytes as f64);
    let mut text = format!("{}: {} tensors, {size}\n{}", args.out.display(), report.n_tensors, table(&rows));
    for note in &report.notes {
        text += &format!("note: {note}\n");
    }
    print(&text)
}
