//! Compiles the kernels and the shim with the host's C++ compiler; without one, the crate says that it is not
//! available.
use std::path::Path;
use std::process::Command;

const TYPES: [&str; 7] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(emulator_built)");
    println!("cargo::rustc-check-cfg=cfg(driver_built)");
    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rerun-if-changed=../powerinfer-cuda/kernels");
    let unix = std::env::var_os("CARGO_CFG_UNIX").is_some();
    match unix.then(build) {
        Some(Ok(())) => {
            println!("cargo::rustc-cfg=emulator_built");
            if std::env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|os| os == "linux") {
                match build_driver() {
                    Ok(()) => println!("cargo::rustc-cfg=driver_built"),
                    Err(error) => println!("cargo::warning=the driver is not emulated: {error}"),
                }
            }
        }
        Some(Err(error)) => println!("cargo::warning=the kernels are not emulated: {error}"),
        None => println!("cargo::warning=the kernels are emulated on Unix only"),
    }
}

/// A compiler set up for kernels: with checks that call into the shim where a device would fault.
fn kernel_compiler() -> cc::Build {
    let mut build = compiler();
    build.flag("-xc++").flag("-fsanitize=alignment,bounds,null").flag("-fno-sanitize-recover=all");
    build
}

/// A compiler set up for kernels and shim.
fn compiler() -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .include("shim")
        .include("../powerinfer-cuda/kernels")
        .define("EMULATED", None)
        .opt_level(2)
        .debug(false)
        .warnings(false)
        .cargo_warnings(false)
        // Products and sums are fused where the kernels say so and nowhere else.
        .flag("-ffp-contract=off")
        .flag("-fno-exceptions")
        // A fiber's jump to another stack is not an error.
        .flag("-U_FORTIFY_SOURCE");
    // `fmaf` is a call without this. What is built here runs here.
    #[cfg(target_arch = "x86_64")]
    if std::env::var_os("CARGO_CFG_TARGET_ARCH").is_some_and(|arch| arch == "x86_64")
        && std::is_x86_feature_detected!("fma")
    {
        build.flag_if_supported("-mfma");
    }
    build
}

fn build() -> Result<(), cc::Error> {
    let kernels = Path::new("../powerinfer-cuda/kernels");
    let mut objects = kernel_compiler()
        .file(kernels.join("base.cu"))
        .file("shim/selftest.cu")
        .try_compile_intermediates()?;
    for ty in TYPES {
        let file = kernels.join("weight.cu");
        objects.extend(
            kernel_compiler()
                .file(file)
                .define("WEIGHT", ty)
                .out_dir(out_dir(ty))
                .try_compile_intermediates()?,
        );
    }
    let names = TYPES.iter().chain(&["base", "selftest"]);
    let declared: String =
        names.clone().map(|t| format!("extern \"C\" void emulated_module_{t}();")).collect();
    let called: String = names.map(|t| format!("emulated_module_{t}();")).collect();
    let mut shim = compiler();
    shim.file("shim/emulator.cpp")
        .define("EMULATED_MODULES", &*format!("{declared} static void emulated_modules() {{ {called} }}"));
    objects.iter().for_each(|object| {
        shim.object(object);
    });
    shim.try_compile("emulator")
}

/// Objects of one source for several types need folders of their own.
fn out_dir(ty: &str) -> std::path::PathBuf {
    Path::new(&std::env::var_os("OUT_DIR").unwrap_or_default()).join(ty)
}

/// Functions that one of the emulated drivers lacks.
const LACKING: [&str; 2] = ["cuMemHostAlloc", "cuGraphLaunch"];

/// The emulated driver, whole and without one function each.
fn build_driver() -> Result<(), Box<dyn std::error::Error>> {
    let objects = compiler().file("shim/driver.cpp").try_compile_intermediates()?;
    for lacking in std::iter::once(None).chain(LACKING.map(Some)) {
        let folder =
            out_dir("driver").join(lacking.map_or("whole".to_owned(), |name| format!("without-{name}")));
        std::fs::create_dir_all(&folder)?;
        let exports = folder.join("exports");
        let hidden = lacking.map_or(String::new(), |name| format!("local: {name};"));
        std::fs::write(&exports, format!("{{ global: cu*; {hidden} }};"))?;
        let mut command: Command = compiler().try_get_compiler()?.to_command();
        command.args(["-shared", "-o"]).arg(folder.join("libcuda.so")).args(&objects);
        command.arg("-Wl,--whole-archive").arg(out_dir("libemulator.a")).arg("-Wl,--no-whole-archive");
        command.arg(format!("-Wl,--version-script={}", exports.display()));
        let output = command.output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
    }
    Ok(())
}
