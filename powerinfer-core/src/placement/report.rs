//! A plan as text, JSON and picture.

use std::fmt;

use serde_json::{Value, json};

use super::plan::{DevicePlan, Plan};

/// Prints a plan line by line, at most 100 columns wide but for names and reasons.
#[derive(Debug)]
pub struct PlanTable<'a>(pub &'a Plan);

impl fmt::Display for PlanTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.0;
        let n_layer = plan.assignment.layers.len();
        for device in &plan.devices {
            writeln!(f, "{}: {} of {}", device.name, size(device.bytes.total()), size(device.usable_bytes))?;
            for (what, bytes, why) in lines(device, n_layer) {
                writeln!(f, "  {what:<40} {:>11}  {why}", size(bytes))?;
            }
            for reason in &device.reasons {
                let n = device.of_neurons;
                match device.n_neurons {
                    0 => writeln!(f, "  0 of {n} neurons on {}, because {reason}", device.name)?,
                    _ => writeln!(f, "  {reason}")?,
                }
            }
        }
        let (with, without) = (1.0 / plan.token_seconds, 1.0 / plan.host_seconds);
        writeln!(f, "predicted: {with:.1} tokens/s, {without:.1} with everything on the host")?;
        let given = if plan.devices.len() > 1 { " on each device, given those before it" } else { "" };
        write!(f, "at most {:.2} % from the best placement{given}", 100.0 * plan.gap)
    }
}

fn lines(device: &DevicePlan, n_layer: usize) -> Vec<(String, u64, String)> {
    let bytes = &device.bytes;
    let all = [
        (format!("attention and norms of {} of {n_layer} layers", device.n_homes), bytes.dense),
        ("keys and values of these layers".to_owned(), bytes.kv),
        ("predictors of these layers".to_owned(), bytes.predictors),
        ("output matrix".to_owned(), bytes.head),
        (format!("{} of {} neurons", device.n_neurons, device.of_neurons), bytes.neurons),
        ("what a step works in".to_owned(), bytes.steps),
    ];
    let why = [
        "read for every token".to_owned(),
        "read for every token, with their layer".to_owned(),
        "read for every token, with their layer".to_owned(),
        "read for every token".to_owned(),
        format!("{:.0} % of the activations, hottest first", 100.0 * device.active_share),
        "of the batch, logits included".to_owned(),
    ];
    all.into_iter().zip(why).filter(|((_, n), _)| *n > 0).map(|((what, n), why)| (what, n, why)).collect()
}

/// Bytes for people.
pub(crate) fn size(n_bytes: u64) -> String {
    let n = n_bytes as f64;
    match n_bytes {
        0..1024 => format!("{n_bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", n / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", n / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", n / f64::from(1 << 30)),
    }
}

impl Plan {
    /// The plan for programs; neurons by their number.
    pub fn to_json(&self) -> Value {
        let devices = self.devices.iter().enumerate().map(|(i, device)| {
            let layers = self.assignment.layers.iter();
            json!({
                "name": device.name,
                "usable_bytes": device.usable_bytes,
                "bytes": device.bytes,
                "total_bytes": device.bytes.total(),
                "n_homes": device.n_homes,
                "has_head": device.has_head,
                "n_neurons": device.n_neurons,
                "of_neurons": device.of_neurons,
                "active_share": device.active_share,
                "neurons_by_layer": layers.map(|l| l.owned[i + 1].len()).collect::<Vec<_>>(),
                "reasons": device.reasons,
            })
        });
        json!({
            "devices": devices.collect::<Vec<_>>(),
            "homes": self.assignment.layers.iter().map(|l| l.home).collect::<Vec<_>>(),
            "head": self.assignment.head,
            "tokens_per_second": 1.0 / self.token_seconds,
            "host_tokens_per_second": 1.0 / self.host_seconds,
            "gap": self.gap,
        })
    }

    /// The plan as a picture: a bar for each layer, with the share of its neurons on each device; a frame marks layers
    /// whose dense part is on a device.
    pub fn to_svg(&self) -> String {
        const WIDTH: usize = 600;
        const ROW: usize = 14;
        const LEFT: usize = 60;
        let colors = ["#9aa5b1", "#d9822b", "#3b7dd8", "#3f9b5f"];
        let names = std::iter::once("host").chain(self.devices.iter().map(|d| d.name.as_str()));
        let height = (self.assignment.layers.len() + 3) * ROW;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"10\">\n",
            WIDTH + LEFT + 20
        );
        for (i, name) in names.enumerate() {
            let x = LEFT + 150 * i;
            let color = colors[i % colors.len()];
            out += &format!("<rect x=\"{x}\" y=\"4\" width=\"10\" height=\"10\" fill=\"{color}\"/>");
            out += &format!("<text x=\"{}\" y=\"13\">{}</text>\n", x + 14, escaped(name));
        }
        for (layer, assigned) in self.assignment.layers.iter().enumerate() {
            let y = (layer + 2) * ROW;
            out += &format!("<text x=\"4\" y=\"{}\">layer {layer}</text>", y + 9);
            let n_ff: usize = assigned.owned.iter().map(powerinfer_sparse_ops::NeuronSet::len).sum();
            let mut x = LEFT as f64;
            for i in (1..assigned.owned.len()).chain([0]) {
                let width = WIDTH as f64 * assigned.owned[i].len() as f64 / n_ff.max(1) as f64;
                let color = colors[i % colors.len()];
                out += &format!(
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{color}\"/>",
                    ROW - 3
                );
                x += width;
            }
            if assigned.home > 0 {
                out += &format!(
                    "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{}\" fill=\"none\" stroke=\"black\"/>",
                    ROW - 3
                );
            }
            out.push('\n');
        }
        out + "</svg>\n"
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
