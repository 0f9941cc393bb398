-- What is known of an event that came before. The hash tells a repeat from another body under the same id.
-- $1 source   $2 event id   $3 sha256 of the body that came now
SELECT e.payload_sha256 = $3 AS same, coalesce(e.event_type, '') AS event_type, e.status,
       coalesce(e.last_error, '') AS last_error, coalesce(e.execution_id, e.last_execution_id, '') AS execution_id,
       coalesce(d.attempts, 0) AS attempts
FROM {{outbox_webhook_events}} e LEFT JOIN {{outbox_dead_letter}} d USING (source, event_id)
WHERE e.source = $1 AND e.event_id = $2
