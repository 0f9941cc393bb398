-- For how many milliseconds more the relays look by themselves; negative: they sleep.
SELECT s.last_value - (extract(epoch FROM clock_timestamp()) * 1000)::bigint FROM {{outbox_awake_until}} s
