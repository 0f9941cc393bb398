-- All that is known of one event, dead or not.
-- $1 source   $2 event id
SELECT e.source, e.event_id, coalesce(e.event_type, '') AS event_type, e.status, e.last_error, e.payload,
       encode(e.payload_sha256, 'hex') AS payload_sha256, octet_length(e.payload)::bigint AS payload_bytes,
       e.received_at::text AS received_at, e.processed_at::text AS processed_at, e.execution_id, e.last_execution_id,
       d.status AS dlq_status, coalesce(d.attempts, 0) AS attempts, d.reason_class,
       d.first_failed_at::text AS first_failed_at, d.last_failed_at::text AS last_failed_at,
       d.resolved_at::text AS resolved_at
FROM {{outbox_webhook_events}} e LEFT JOIN {{outbox_dead_letter}} d USING (source, event_id)
WHERE e.source = $1 AND e.event_id = $2
