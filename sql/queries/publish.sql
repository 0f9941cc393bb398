-- Write events in the order given, within the caller's transaction. Answers their ids in that order.
-- The function is called once for each, after the sort: what is volatile is.
-- $1 aggregate types   $2 aggregate ids   $3 event types   $4 payloads as JSON text   $5 headers as JSON text
-- $6 correlation ids   $7 event ids as text   $8 due times   $9 seconds from now until due   $10 most bytes of a payload
SELECT {{outbox_publish}}(
           e.aggregate_type, e.aggregate_id, e.event_type, e.payload::{{payload_type}}, e.headers::jsonb, e.correlation_id,
           e.event_id::uuid, coalesce(e.due_at, clock_timestamp() + make_interval(secs => e.due_in)), $10) AS id
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::timestamptz[], $9::float8[])
     WITH ORDINALITY e (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id, event_id, due_at, due_in, n)
ORDER BY e.n
