-- What became of replayed events, as it was committed.
-- $1 sources   $2 event ids, in pairs with them
SELECT e.source, e.event_id, coalesce(e.event_type, '') AS event_type, e.status, coalesce(e.last_error, '') AS last_error,
       e.received_at::text AS received_at, e.processed_at::text AS processed_at, coalesce(d.attempts, 0) AS attempts,
       coalesce(d.status, '') AS dlq_status
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS named (source, event_id, place)
JOIN {{outbox_webhook_events}} e USING (source, event_id)
LEFT JOIN {{outbox_dead_letter}} d USING (source, event_id)
ORDER BY named.place
