-- Answers a row to the one who raised it, and tells the people.
-- $1 subject   $2 name of the replica
INSERT INTO {{outbox_alert}} (subject, raised_by) VALUES ($1, $2)
ON CONFLICT (subject) DO NOTHING
RETURNING subject
