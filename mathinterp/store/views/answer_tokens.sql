-- answer_tokens: one row per scored answer token. position: 0 = first scored token of the prompt; kind: digit, sign or text.
-- carry_class (paper A, Table 3): change-one if the token's column received a carry or borrow, else memorize;
-- mixed where one token covers columns of both.
CREATE OR REPLACE VIEW answer_tokens AS
SELECT prompts_fingerprint, prompt_id, position, token_id, token, kind, carry_class
FROM ${answer_tokens};
