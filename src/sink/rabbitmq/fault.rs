//! From lapin's errors to causes. Pure: no I/O.
//!
//! Only a broker's own reason for closing something can accuse an event, and only if nothing else
//! was unconfirmed there. Everything else is the transport's trouble.

use std::io;

use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::{Error, ErrorKind};

use crate::relay::failure::Cause;
use crate::sink::SinkError;
use crate::tls;

/// Names for error texts; no user, no password.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// `host:port`.
    pub(super) address: String,
    /// By TLS.
    pub(super) encrypted: bool,
    pub(super) vhost: String,
}

/// How many messages were unconfirmed when something was closed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unconfirmed {
    pub(super) on_channel: usize,
    pub(super) on_connection: usize,
}

impl Place {
    /// Why a connection did not come about.
    pub(super) fn connect_failed(&self, error: &Error) -> SinkError {
        let Self { address, vhost, .. } = self;
        let message = match hard_or_soft(error) {
            Some((AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED), _)) => {
                format!("RabbitMQ rejected the user name or password at {address}")
            }
            Some((AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED), text)) => format!(
                "RabbitMQ at {address} refused vhost '{vhost}': {text}. Create it, and give the \
                 user permissions on it."
            ),
            _ => format!(
                "cannot connect to RabbitMQ at {address}: {}{}",
                reason(error),
                self.hint(error)
            ),
        };
        SinkError::new(Cause::Unreachable, message)
    }

    /// A server with other ideas of TLS than ours often says no more than goodbye.
    fn hint(&self, error: &Error) -> &'static str {
        let speechless = match error.kind() {
            ErrorKind::ParsingError(_) => true,
            ErrorKind::IOError(error) => matches!(
                error.kind(),
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof
            ),
            _ => false,
        };
        match (speechless, self.encrypted) {
            (false, _) => "",
            (true, false) => "; if the port is one for TLS, rabbitmq.url must begin with amqps://",
            (true, true) => {
                "; it may want a client certificate (rabbitmq.cert_file and rabbitmq.key_file)"
            }
        }
    }

    /// The connection is gone, with whatever is known of why.
    pub(super) fn connection_lost(&self, why: &str) -> SinkError {
        SinkError::new(
            Cause::Unreachable,
            format!("connection to RabbitMQ at {} lost: {why}", self.address),
        )
    }

    /// What an error says of a message to this exchange that was unconfirmed on the channel it came
    /// from.
    pub(super) fn closed(
        &self,
        error: &Error,
        exchange: &str,
        unconfirmed: Unconfirmed,
    ) -> SinkError {
        match hard_or_soft(error) {
            Some((AMQPErrorKind::Soft(kind), text)) => {
                self.channel_closed(kind, text, exchange, unconfirmed.on_channel)
            }
            Some((AMQPErrorKind::Hard(kind), text)) => {
                self.connection_closed(kind, text, unconfirmed.on_connection)
            }
            None => self.connection_lost(&reason(error)),
        }
    }

    fn channel_closed(
        &self,
        kind: &AMQPSoftError,
        text: &str,
        exchange: &str,
        unconfirmed: usize,
    ) -> SinkError {
        let vhost = &self.vhost;
        // Of several exchanges on a channel the broker names the one it means.
        let meant = unconfirmed <= 1 || text.contains(&format!("'{exchange}'"));
        match kind {
            AMQPSoftError::NOTFOUND if meant => SinkError::new(
                Cause::DestinationMissing,
                format!(
                    "Exchange '{exchange}' does not exist in vhost '{vhost}': declare it and bind \
                     the consumer queues."
                ),
            ),
            AMQPSoftError::ACCESSREFUSED if meant => SinkError::new(
                Cause::Forbidden,
                format!("publishing to exchange '{exchange}' in vhost '{vhost}' refused: {text}"),
            ),
            _ => self.accused("channel", text, unconfirmed, {
                matches!(kind, AMQPSoftError::CONTENTTOOLARGE) || names_the_size(text)
            }),
        }
    }

    fn connection_closed(&self, kind: &AMQPHardError, text: &str, unconfirmed: usize) -> SinkError {
        match kind {
            // By an operator, a shutdown, a deleted vhost or user: no event's fault.
            AMQPHardError::CONNECTIONFORCED
            | AMQPHardError::INVALIDPATH
            | AMQPHardError::NOTALLOWED
            | AMQPHardError::RESOURCEERROR
            // Publishes were under way on a channel that the broker had closed just before; the
            // message that it was closed for is accused there.
            | AMQPHardError::CHANNELERROR => self.connection_lost(text),
            _ => self.accused("connection", text, unconfirmed, false),
        }
    }

    fn accused(&self, what: &str, text: &str, unconfirmed: usize, by_size: bool) -> SinkError {
        let cause = match unconfirmed {
            1 if by_size => Cause::TooLarge,
            1 => Cause::ClosedOn,
            _ => Cause::Suspect,
        };
        let with = if unconfirmed > 1 {
            format!(" with {unconfirmed} messages unconfirmed")
        } else {
            String::new()
        };
        SinkError::new(
            cause,
            format!(
                "RabbitMQ at {} closed the {what}{with}: {text}",
                self.address
            ),
        )
    }
}

/// Does an error name the broker's reason? The first that does is kept: what follows it is `invalid
/// channel state`.
pub(super) fn tells_why(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ProtocolError(_) | ErrorKind::IOError(_) | ErrorKind::MissingHeartbeatError
    )
}

/// `PRECONDITION_FAILED - message size 2097152 is larger than configured max size 1048576`.
fn names_the_size(text: &str) -> bool {
    text.contains("message size") && text.contains("larger than")
}

fn hard_or_soft(error: &Error) -> Option<(&AMQPErrorKind, &str)> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some((error.kind(), error.get_message().as_str())),
        _ => None,
    }
}

/// The text without lapin's own prefix where that says nothing.
pub(super) fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::IOError(error) => {
            tls::explain(error.as_ref(), "rabbitmq").unwrap_or_else(|| error.to_string())
        }
        ErrorKind::ProtocolError(error) => error.get_message().as_str().to_owned(),
        ErrorKind::ParsingError(_) => "what answers does not speak AMQP".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::protocol::AMQPError;

    fn place() -> Place {
        Place {
            address: "mq:5672".into(),
            encrypted: false,
            vhost: "shop".into(),
        }
    }

    fn closed(code: u16, text: &str, on_channel: usize, on_connection: usize) -> SinkError {
        let error = AMQPError::from_id(code, text.into()).unwrap();
        place().closed(
            &ErrorKind::ProtocolError(error).into(),
            "events",
            Unconfirmed {
                on_channel,
                on_connection,
            },
        )
    }

    #[test]
    fn a_missing_exchange_is_named_with_its_vhost() {
        let error = closed(404, "NOT_FOUND - no exchange 'events'", 5, 5);
        assert_eq!(error.cause, Cause::DestinationMissing);
        assert_eq!(
            error.message,
            "Exchange 'events' does not exist in vhost 'shop': declare it and bind the consumer \
             queues."
        );
    }

    #[test]
    fn a_missing_exchange_says_nothing_of_messages_to_another() {
        for (code, text) in [
            (404, "NOT_FOUND - no exchange 'billing' in vhost 'shop'"),
            (
                403,
                "ACCESS_REFUSED - access to exchange 'billing' in vhost 'shop' refused",
            ),
        ] {
            assert_eq!(closed(code, text, 3, 3).cause, Cause::Suspect);
        }
    }

    #[test]
    fn only_a_message_alone_on_its_channel_is_accused() {
        let size = "PRECONDITION_FAILED - message size 2097152 is larger than configured max size \
                    1048576";
        assert_eq!(closed(406, size, 1, 9).cause, Cause::TooLarge);
        assert_eq!(closed(406, size, 2, 2).cause, Cause::Suspect);
        assert_eq!(
            closed(406, "PRECONDITION_FAILED - x", 1, 9).cause,
            Cause::ClosedOn
        );
        assert_eq!(closed(403, "ACCESS_REFUSED", 1, 1).cause, Cause::Forbidden);
    }

    #[test]
    fn a_closed_connection_accuses_only_who_was_alone_on_it() {
        assert_eq!(closed(501, "FRAME_ERROR", 1, 1).cause, Cause::ClosedOn);
        assert_eq!(closed(501, "FRAME_ERROR", 1, 2).cause, Cause::Suspect);
        assert_eq!(closed(541, "INTERNAL_ERROR", 0, 1).cause, Cause::ClosedOn);
        for code in [320, 504, 530] {
            assert_eq!(closed(code, "x", 1, 1).cause, Cause::Unreachable, "{code}");
        }
    }

    #[test]
    fn transport_trouble_accuses_nobody() {
        let error = place().closed(
            &ErrorKind::MissingHeartbeatError.into(),
            "events",
            Unconfirmed {
                on_channel: 1,
                on_connection: 1,
            },
        );
        assert_eq!(error.cause, Cause::Unreachable);
        assert!(error.message.contains("mq:5672"));
    }

    #[test]
    fn a_wrong_password_is_said_without_it() {
        let text = "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN.";
        let error = AMQPError::from_id(403, text.into()).unwrap();
        let error = place().connect_failed(&ErrorKind::ProtocolError(error).into());
        assert_eq!(
            error.message,
            "RabbitMQ rejected the user name or password at mq:5672"
        );
    }
}
