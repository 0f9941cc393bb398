//! The management API of the private broker.

use reqwest::{Client, Method};
use url::Url;

use super::amqp_url;

/// Declares what AMQP cannot: users and policies.
pub struct Management {
    /// Without user and password.
    pub url: String,
    client: Client,
}

impl Management {
    /// None, said loudly, when there is none.
    pub fn ours() -> Option<Self> {
        let Ok(url) = std::env::var("BELLWIRE_TEST_MANAGEMENT_URL") else {
            eprintln!(
                "SKIPPED: no management API; unset AMQP_URL, install RabbitMQ's management plugin, \
                 then `make stop test`"
            );
            return None;
        };
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().tls_certs_only([]).build().unwrap();
        Some(Self { url, client })
    }

    /// With this user.
    pub fn url_of(&self, user: &str, password: &str) -> String {
        let mut url = Url::parse(&self.url).unwrap();
        url.set_username(user).unwrap();
        url.set_password(Some(password)).unwrap();
        url.to_string()
    }

    pub async fn put(&self, path: &[&str], body: serde_json::Value) {
        self.send(Method::PUT, path, Some(body)).await;
    }

    pub async fn delete(&self, path: &[&str]) {
        self.send(Method::DELETE, path, None).await;
    }

    /// A user who may do everything in vhost `/` by AMQP, with these tags.
    pub async fn user(&self, name: &str, password: &str, tags: &str) {
        let user = serde_json::json!({ "password": password, "tags": tags });
        self.put(&["users", name], user).await;
        let all = serde_json::json!({ "configure": ".*", "write": ".*", "read": ".*" });
        self.put(&["permissions", "/", name], all).await;
    }

    async fn send(&self, method: Method, path: &[&str], body: Option<serde_json::Value>) {
        let mut url = Url::parse(&self.url).unwrap();
        url.path_segments_mut()
            .unwrap()
            .pop_if_empty()
            .push("api")
            .extend(path);
        // By AMQP's user, who is an administrator.
        let amqp = Url::parse(&amqp_url()).unwrap();
        let mut request = self
            .client
            .request(method, url)
            .basic_auth(amqp.username(), amqp.password());
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await.unwrap();
        assert!(answer.status().is_success(), "{path:?}: {answer:?}");
    }
}
