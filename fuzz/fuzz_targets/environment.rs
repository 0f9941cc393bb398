#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bellwire::fuzz::run("environment", bytes));
