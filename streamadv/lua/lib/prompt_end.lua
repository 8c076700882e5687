-- The end of a prompt's group, in the stream from which it is carried to the home shard: the last ones are kept, since that
-- one may lose what it was told.
-- KEYS  prompt_ends
local PROMPT_ENDS_KEPT = 8192

local function note_prompt_end(id, outcome)
  if string.sub(id, 1, 7) == 'prompt:' then
    redis.call('XADD', keys.prompt_ends, 'MAXLEN', '~', PROMPT_ENDS_KEPT, '*', 'group', id, 'outcome', outcome)
  end
end
