-- Answers to the one who cleared it how long it stood. Not while a live replica still cannot publish.
-- $1 subject
DELETE FROM {{outbox_alert}}
WHERE subject = $1
  AND NOT EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.lease_until > clock_timestamp() AND NOT r.ready)
RETURNING extract(epoch FROM now() - since)::float8
