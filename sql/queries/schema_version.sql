-- Highest migration applied.
SELECT coalesce(max(version), 0)::int FROM {{outbox_migrations}}
