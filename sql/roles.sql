-- Four roles, each with the rights that it needs and no others. After `bellwire migrate`, as the owner of the tables
-- who may also create roles, or as an administrator:
--
--     psql "$DATABASE_URL" --set ON_ERROR_STOP=1 --file sql/roles.sql
--
-- They are groups: let the logins of your services be members, as in GRANT bellwire_relay TO shop_relay. It may run
-- again, and has to after a version that brings new tables. For another schema or table replace "public" or "outbox".

DO $$
DECLARE
    party text;
BEGIN
    FOREACH party IN ARRAY ARRAY['bellwire_writer', 'bellwire_relay', 'bellwire_intake', 'bellwire_operator'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = party) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', party);
        END IF;
    END LOOP;
END
$$;

GRANT USAGE ON SCHEMA public TO bellwire_writer, bellwire_relay, bellwire_intake, bellwire_operator;

-- The application. INSERT ... RETURNING id wants SELECT (id) too, and an adopted table whose id is a serial column
-- wants USAGE on its sequence.
GRANT INSERT ON public.outbox TO bellwire_writer;
-- For the library, which looks at the schema's version when it opens the outbox. The function outbox_publish may be
-- executed by everybody, and does no more than the caller's right to INSERT.
GRANT SELECT ON public.outbox_migrations TO bellwire_writer;

-- `bellwire run`.
GRANT SELECT, UPDATE, DELETE ON public.outbox TO bellwire_relay;
GRANT SELECT, UPDATE ON public.outbox_bucket, public.outbox_relay_state TO bellwire_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.outbox_replica, public.outbox_alert TO bellwire_relay;
GRANT SELECT ON public.outbox_migrations TO bellwire_relay;
GRANT USAGE ON SEQUENCE public.outbox_token TO bellwire_relay;
GRANT SELECT, UPDATE ON SEQUENCE public.outbox_awake_until TO bellwire_relay;
-- For relay.ordering = "strict". Another name where the application made the table.
GRANT SELECT ON SEQUENCE public.outbox_id_seq TO bellwire_relay;

-- `bellwire run` with an intake, and `bellwire intake replay`. What its routes' own statements need comes on top. A
-- process with both doors is a member of both roles.
GRANT SELECT, INSERT, UPDATE, DELETE ON public.outbox_webhook_events TO bellwire_intake;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.outbox_dead_letter TO bellwire_intake;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.outbox_intake_audit TO bellwire_intake;
GRANT SELECT ON public.outbox_migrations TO bellwire_intake;
-- For routes that write to the outbox.
GRANT INSERT ON public.outbox TO bellwire_intake;

-- People: `bellwire status` and `check`, a look at events, replay and discard. What an event says is not theirs to
-- change.
GRANT SELECT ON public.outbox, public.outbox_bucket, public.outbox_replica, public.outbox_migrations,
    public.outbox_relay_state, public.outbox_alert TO bellwire_operator;
GRANT UPDATE (status, attempts, next_attempt_at, last_error, failed_in, holds, claimed_by, claimed_until) ON public.outbox TO bellwire_operator;
GRANT SELECT ON public.outbox_webhook_events, public.outbox_dead_letter, public.outbox_intake_audit TO bellwire_operator;
GRANT UPDATE (status) ON public.outbox_webhook_events TO bellwire_operator;
GRANT UPDATE (status, resolved_at, claimed_by, claimed_at) ON public.outbox_dead_letter TO bellwire_operator;
GRANT INSERT ON public.outbox_intake_audit TO bellwire_operator;
