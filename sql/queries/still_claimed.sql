-- Which of these rows are still claimed under this token? Asked for rows that a mark did not reach:
-- those are locked by somebody and to be tried again, the others are no longer ours.
-- $1 ids   $2 name of the token
SELECT id FROM {{outbox}} WHERE id = ANY ($1) AND claimed_by = $2 AND status || '' = 'pending'
