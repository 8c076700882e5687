-- Prompts of one set. A prompt is '<number of its source> <position>'. `prompt_entries` has those that were begun and have
-- not ended: '<try> <failures> <nonce of the lease> <owner>'. In the place of nonce and owner, '-' is for one that waits to
-- be played again (these are in `prompt_again` too, by position), 'ended' for one whose group has ended, nobody knows how.
-- 'ended' alone stands for one that has ended while its position is not below
-- `next` (it was set back). `prompt_state` has
--   'next:<source>'   the first position that was never begun
--   'back:<source>'   the highest 'next' that was set back
--   'base'            the first try of a prompt that is begun now; it grows when prompts are set back
--   'tries'           above every try there was
--   'cursor:<shard>'  the last end of a group there that was carried here
--   'branch'          of the trainer that has set them back last
--   'is_back'         '1' once some came back that had ended, or were rolled back
--   'born'            id of all this
--   'given_up'        how many were ever given up: the order in `prompt_given_up`
--   'selected'        the last period that weights were selected for; 'weight:<source>' these, 'from:<source>' `next` then
--   other fields      counters: '<what> <source> <epoch>'
-- KEYS  prompt_entries, prompt_again
local NOBODY, GONE = '-', 'ended'

local function whole(number) return string.format('%d', number) end

-- Try and failures of an entry, and the nonce of its lease; nil for a prompt that has none.
local function read_entry(item)
  local try, failures, nonce = string.match(redis.call('HGET', keys.prompt_entries, item) or '', '^(%d+) (%d+) (%S+)')
  return tonumber(try or ''), tonumber(failures or ''), nonce
end

-- Somebody has to play the prompt again.
local function play_again(item, try, failures)
  redis.call('HSET', keys.prompt_entries, item, whole(try) .. ' ' .. whole(failures) .. ' ' .. NOBODY)
  redis.call('ZADD', keys.prompt_again, string.match(item, '%d+$'), item)
end
