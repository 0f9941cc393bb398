-- Begins the replay of one event: locks it, and looks whether it is still ours. No row: somebody else has it, or has
-- dealt with it.
-- $1 source   $2 event id   $3 execution
SELECT 1
FROM {{outbox_webhook_events}} e
WHERE e.source = $1 AND e.event_id = $2
  AND (EXISTS (SELECT FROM {{outbox_dead_letter}} d
               WHERE d.source = e.source AND d.event_id = e.event_id AND d.status IN ('retryable', 'parked') AND d.claimed_by = $3)
       OR (e.status IN ('received', 'failed')
           AND NOT EXISTS (SELECT FROM {{outbox_dead_letter}} d WHERE d.source = e.source AND d.event_id = e.event_id)))
FOR UPDATE OF e SKIP LOCKED
