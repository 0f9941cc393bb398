//! What is asked of the admin port, fed with any bytes.

use actix_web::web::Query;

use super::{dead, intake, tail};
use crate::fuzz::texts;

/// Parameters of a request.
pub(crate) fn query(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    let _ = Query::<dead::Listing>::from_query(text);
    let _ = Query::<intake::Listing>::from_query(text);
    let _ = Query::<tail::Wanted>::from_query(text);
}

/// The body of an order.
pub(crate) fn order(bytes: &[u8]) {
    if let Ok(order) = serde_json::from_slice::<dead::Order>(bytes)
        && order.filter().is_ok_and(|filter| filter.is_empty())
    {
        let text = String::from_utf8_lossy(bytes);
        assert!(text.contains("true"), "nothing is not all: {text}");
    }
    let _ = serde_json::from_slice::<intake::ReplayOrder>(bytes);
    let _ = serde_json::from_slice::<intake::DiscardOrder>(bytes);
}
