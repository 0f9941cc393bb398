-- Takes an event, unless its id is known: no row then. Waits for whoever has just brought the same id. A row that an
-- older version left behind in mid-work, and nobody touched for five minutes, is taken over.
-- $1 source   $2 event id   $3 event type   $4 body   $5 its sha256   $6 status   $7 execution
INSERT INTO {{outbox_webhook_events}} AS e
    (source, event_id, event_type, payload, payload_sha256, status, processed_at, execution_id, last_execution_id)
VALUES ($1, $2, $3, $4, $5, $6::text, CASE WHEN $6::text = 'processed' THEN now() END, $7, $7)
ON CONFLICT (source, event_id) DO UPDATE
SET status = excluded.status, event_type = excluded.event_type, last_error = NULL, received_at = excluded.received_at,
    processed_at = excluded.processed_at, last_execution_id = excluded.last_execution_id
WHERE e.status = 'received' AND e.payload_sha256 = excluded.payload_sha256
  AND e.received_at < now() - interval '5 minutes'
RETURNING coalesce(e.execution_id, '') AS execution_id
