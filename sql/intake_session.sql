-- Settings of the intake's sessions, in which users' statements run: their own, but for how long they may take.
SET default_transaction_isolation = 'read committed';
SET client_min_messages = 'warning';
SET lock_timeout = '{{deadline_ms}}ms';
SET statement_timeout = '{{deadline_ms}}ms';
SET idle_in_transaction_session_timeout = '10s';
