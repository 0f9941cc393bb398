//! Roles with the rights of `sql/roles.sql`, in one world.

use super::{SOON, World, database_url};

const PARTIES: [&str; 4] = ["writer", "relay", "intake", "operator"];

impl World {
    /// URL of a login that is a member of this party's role, with these defaults.
    pub async fn login(&self, party: &str, defaults: &[&str]) -> String {
        let schema = &self.schema;
        // Roles belong to the whole cluster, so the world's name is in theirs.
        let roles = include_str!("../../../sql/roles.sql")
            .replace("bellwire_", &format!("{schema}_"))
            .replace("public", schema);
        self.sql(&roles).await;
        let login = format!("{schema}_{party}_login");
        self.sql(&format!(
            "CREATE ROLE {login} LOGIN; GRANT {schema}_{party} TO {login}"
        ))
        .await;
        for default in defaults {
            self.sql(&format!("ALTER ROLE {login} SET {default}")).await;
        }
        let mut url = url::Url::parse(&database_url()).unwrap();
        url.set_username(&login).unwrap();
        url.to_string()
    }

    /// Removes the roles, and the logins that were made.
    pub async fn drop_roles(&self) {
        let schema = &self.schema;
        // Sessions of relays that were just killed may linger.
        let gone = format!(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename LIKE '{schema}\\_%')"
        );
        self.until(&gone, SOON).await;
        for party in PARTIES {
            let role = format!("{schema}_{party}");
            self.sql(&format!(
                "DROP ROLE IF EXISTS {role}_login; DROP OWNED BY {role}; DROP ROLE {role}"
            ))
            .await;
        }
    }
}
