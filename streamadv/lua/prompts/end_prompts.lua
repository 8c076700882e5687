-- What ends of groups mean for their prompts: trained on, filtered, played again under the next try, or given up. An end
-- counts unless its prompt has ended or is at a later try, so carrying it here twice changes nothing. A home shard that has
-- lost its last writes may hear of a prompt that it has not begun, or of a later try.
-- KEYS  void, prompt_state, prompt_entries, prompt_again, prompt_given_up
-- ARGV  retries; shard, last entry of its ends that the caller had known, and the last one here; 'check' (take them only if
--       the run had known just as much) or 'repeat'; then of each end: prompt, try, epoch, outcome
-- Returns  the last entry known: another one than the caller's if nothing was changed
-- include prompts
-- include prompt_state
local GIVEN_UP_KEPT = 1000
local FILTERS = {zero_variance = true, difficulty = true}
local NO_FAULT = {rolled_back = true}  -- of the prompt: it is played again as often as this happens
local retries, cursor = tonumber(ARGV[1]), 'cursor:' .. ARGV[2]
if ARGV[5] == 'check' then
  local known = redis.call('HGET', keys.prompt_state, cursor) or '0-0'
  if known ~= ARGV[3] then return known end
end
redis.call('HSET', keys.prompt_state, cursor, ARGV[4])

local function count_up(what, item, epoch, by)
  redis.call('HINCRBY', keys.prompt_state, what .. ' ' .. string.match(item, '^%d+') .. ' ' .. epoch, by)
end

local function finish(item, epoch, what)
  local source, position = string.match(item, '^(%d+) (%d+)$')
  if tonumber(position) < number_of('next:' .. source) then
    redis.call('HDEL', keys.prompt_entries, item)
  else
    redis.call('HSET', keys.prompt_entries, item, 'ended')
  end
  redis.call('ZREM', keys.prompt_again, item)
  count_up(what, item, epoch, 1)
end

local function give_up(item, try, epoch, outcome)
  finish(item, epoch, 'given_up:' .. outcome)
  local order = number_of('given_up') + 1
  redis.call('HSET', keys.prompt_state, 'given_up', whole(order))
  redis.call('ZADD', keys.prompt_given_up, whole(order), item .. ' ' .. whole(try) .. ' ' .. outcome)
  if redis.call('ZCARD', keys.prompt_given_up) > GIVEN_UP_KEPT then
    redis.call('ZREM', keys.prompt_given_up, redis.call('ZRANGE', keys.prompt_given_up, 0, 0)[1])
  end
end

-- An operator has put a dead group back: its try is in play again, unless another one is.
local function take_back(item, try, epoch)
  local now, failures, nonce = read_entry(item)
  if now == try + 1 and nonce == NOBODY then
    redis.call('ZREM', keys.prompt_again, item)
    count_up('again:dead', item, epoch, -1)
    redis.call('HSET', keys.prompt_entries, item, whole(try) .. ' ' .. whole(math.max(0, failures - 1)) .. ' ' .. GONE)
  elseif not now and redis.call('ZREM', keys.prompt_given_up, item .. ' ' .. whole(try) .. ' dead') == 1 then
    redis.call('HSET', keys.prompt_entries, item, whole(try) .. ' ' .. whole(retries) .. ' ' .. GONE)
    count_up('given_up:dead', item, epoch, -1)
  end
end

-- Whether an end of this try counts, and how often the prompt had failed before.
local function tries_of(item, try)
  local now, failures = read_entry(item)
  if now then return try >= now, failures end
  local source, position = string.match(item, '^(%d+) (%d+)$')
  local is_new = tonumber(position) >= number_of('next:' .. source) and not redis.call('HGET', keys.prompt_entries, item)
  return is_new and try >= number_of('base'), try - number_of('base')
end

for i = 6, #ARGV, 4 do
  local item, try, epoch, outcome = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
  local counts, failures = tries_of(item, try)
  if outcome == 'requeued' then
    take_back(item, try, epoch)
  elseif not counts then
    -- It has ended, or is played under a later try.
  elseif outcome == 'trained' or outcome == 'repeated' then
    finish(item, epoch, 'trained')
  elseif FILTERS[outcome] then
    finish(item, epoch, 'filtered:' .. outcome)
  elseif failures >= retries and not NO_FAULT[outcome] then
    give_up(item, try, epoch, outcome)
  else
    play_again(item, try + 1, failures + (NO_FAULT[outcome] and 0 or 1))
    note_try(try + 1)
    count_up('again:' .. outcome, item, epoch, 1)
  end
end
return ARGV[4]
