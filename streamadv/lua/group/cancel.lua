-- Cancel slots of an open group: the highest of those allowed that nobody has ended. The same call sent again, under its
-- nonce, cancels no more.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, rollouts
-- ARGV  those of an admission, see lib/admit; nonce of this call, how many slots, for each slot from 0 on '1' if it may be
--       cancelled, else '0'
-- Returns  {'ok', index of each slot cancelled ...}   fewer than wanted: no more of those allowed are free
--          {'ended', 'surplus' | 'late'}   the group had ended: nothing changes
--          {'busy', reason, used, limit ...}, {'mismatch', size}, {'layout'} or {'broken'}, as of `push`
-- include clock
-- include sizes
-- include pacing
-- include admit
-- include play
-- include ended
-- include holders
-- include enter
-- include arrive
local spec = admission_of(ARGV)
local field, wanted, allowed = 'cancel:' .. ARGV[ADMISSION_ARGS + 1], tonumber(ARGV[ADMISSION_ARGS + 2]), ARGV[ADMISSION_ARGS + 3]

local tombstone = find_ended(spec.id)
if tombstone then return {'ended', after_end(tombstone)} end
local slots, _, refused = enter(spec, '-')
if refused then return refused end

local cancelled, before = {}, 0
for index in string.gmatch(redis.call('HGET', keys.group, field) or '', '%d+') do
  cancelled[#cancelled + 1] = index
end
before = #cancelled
local index, stream_ended = math.min(#allowed, slots), false
while #cancelled < wanted and index > 0 and not stream_ended do
  index = index - 1
  if string.sub(allowed, index + 1, index + 1) == '1' and redis.call('HSETNX', keys.group, index, 'p') == 1 then
    stream_ended = redis.pcall('XADD', keys.rollouts, '*', 'group_id', spec.id, 'index', index, 'kind', 'cancelled',
      'reward', '', 'bytes', '0', 'key', '', 'role', 'train', 'reference', '').err ~= nil
    if stream_ended then redis.call('HDEL', keys.group, index) else cancelled[#cancelled + 1] = tostring(index) end
  end
end
if #cancelled > before then
  redis.call('HSET', keys.group, field, table.concat(cancelled, ' '))
  arrive({rollouts = #cancelled - before, scoring = 0, bytes = 0, sizes = {}}, spec.producer)
end
if stream_ended then return redis.error_reply('STREAMEND no more entries fit into its stream') end
return {'ok', unpack(cancelled)}
