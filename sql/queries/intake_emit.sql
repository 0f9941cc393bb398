-- An event for the outbox, in the transaction of the webhook that it comes of: the relay carries it.
-- $1 aggregate type   $2 aggregate id   $3 event type   $4 payload   $5 id of the webhook
INSERT INTO {{outbox}} (aggregate_type, aggregate_id, event_type, payload, correlation_id)
VALUES ($1, $2, $3, ($4::text)::jsonb, $5)
