-- The figures of a set of prompts, see lib/prompts.
-- KEYS  prompt_state
local function number_of(field) return tonumber(redis.call('HGET', keys.prompt_state, field) or '') or 0 end

local function note_try(try)
  if try >= number_of('tries') then redis.call('HSET', keys.prompt_state, 'tries', whole(try + 1)) end
end
