-- How many dead events there are of this kind, exactly.
-- $1..$8 see dead_filter.sql
SELECT count(*) FROM {{outbox}} o
WHERE {{dead_filter}}
