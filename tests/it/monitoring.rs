//! Dashboard, alert rules and compose file name only what is there.

use std::collections::BTreeSet;
use std::path::PathBuf;

use bellwire::metrics::ALL;

fn docker(path: &str) -> PathBuf {
    let docker = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docker");
    docker.join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(docker(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Names of metrics in an expression, without what a histogram's series have at their ends.
fn names(text: &str) -> BTreeSet<String> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| word.starts_with("bellwire_"))
        .map(|word| {
            let suffixes = ["_bucket", "_sum", "_count"];
            let base = suffixes.iter().find_map(|suffix| word.strip_suffix(suffix));
            base.filter(|base| base.ends_with("_seconds"))
                .unwrap_or(word)
                .to_owned()
        })
        .collect()
}

fn declared() -> BTreeSet<String> {
    ALL.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn the_alert_rules_name_metrics_that_there_are() {
    for file in ["alerts.yml", "alerts_test.yml"] {
        let named = names(&read(file));
        assert!(named.len() >= 8, "{named:?}");
        let unknown: Vec<_> = named.difference(&declared()).cloned().collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
}

#[test]
fn the_dashboard_shows_every_metric_and_no_other() {
    let text = read("grafana/dashboards/bellwire.json");
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut shown = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{panel}");
        for target in targets {
            let named = names(target["expr"].as_str().unwrap());
            assert!(!named.is_empty(), "{target}");
            shown.extend(named);
            assert_eq!(target["datasource"]["uid"], "${datasource}");
        }
    }
    assert_eq!(shown, declared());
    // Its variable begins with the data source that is provisioned.
    let source = &dashboard["templating"]["list"][0]["current"]["value"];
    let provisioned = read("grafana/provisioning/datasources/prometheus.yml");
    let uid = format!("uid: {}\n", source.as_str().unwrap());
    assert!(provisioned.contains(&uid), "{provisioned}");
}

#[test]
fn the_compose_file_mounts_files_that_there_are() {
    let compose = read("compose.yaml");
    let mounts: Vec<_> = compose
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- ./"))
        .filter_map(|mount| mount.split(':').next())
        .collect();
    assert!(mounts.len() >= 6, "{mounts:?}");
    for mount in mounts {
        assert!(docker(mount).exists(), "{mount}");
    }
}
