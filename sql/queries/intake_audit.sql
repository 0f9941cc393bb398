-- One row for each request that was verified, and for each event of a replay.
-- $1 execution   $2 mode   $3 outcome   $4 source   $5 event id
INSERT INTO {{outbox_intake_audit}} (execution_id, mode, outcome, source, event_id) VALUES ($1, $2, $3, $4, $5)
